"""Names of Keras, Lightning and Orbit, and what halfstep has instead, for errors.

The pages docs/from-keras.md, docs/from-lightning.md and docs/from-orbit.md hold the same table for
readers; a test compares them.
"""

from typing import Any

TRAIN = "Pass {} to train()."
OPTIMIZER = "Set it in the optimizer: optimizer=lambda: keras.optimizers.Adam(1e-3), for example."

# What to do instead of passing an argument of this name to `Trainer`.
ARGUMENTS = {
    "accelerator": 'Pass strategy="auto", or "mirrored" for all GPUs.',
    "accumulate_grad_batches": "Pass num_microbatches=, which divides one batch.",
    "batch_size": TRAIN.format("global_batch="),
    "check_val_every_n_epoch": TRAIN.format("eval_interval=, in steps,"),
    "checkpoint_manager": "Pass model_dir= and checkpoint_interval=.",
    "default_root_dir": "Pass model_dir=.",
    "devices": 'Pass strategy=strategies.create("mirrored", devices).',
    "enable_progress_bar": "Pass verbose=.",
    "epochs": TRAIN.format("epochs="),
    "eval_data": TRAIN.format("eval_data="),
    "eval_interval": TRAIN.format("eval_interval="),
    "eval_steps": TRAIN.format("eval_steps="),
    "fast_dev_run": "Call dry_run() instead of train().",
    "global_batch": TRAIN.format("global_batch="),
    "gradient_accumulation_steps": "Pass num_microbatches=, which divides one batch.",
    "gradient_clip_val": "Pass global_clipnorm=, or clipvalue=.",
    "learning_rate": OPTIMIZER,
    "log_every_n_steps": "Pass log_interval=.",
    "logger": "Pass model_dir=, and trackers= for other services.",
    "loss": "Pass loss_fn=.",
    "lr": OPTIMIZER,
    "max_epochs": TRAIN.format("epochs="),
    "max_steps": TRAIN.format("steps="),
    "mixed_precision": 'Pass precision="mixed_float16" or "mixed_bfloat16".',
    "num_nodes": 'Pass strategy="multi_worker_mirrored".',
    "overfit_batches": "Call overfit_one_batch() instead of train().",
    "run_eagerly": "Call tf.config.run_functions_eagerly(True) before.",
    "sample_weight": "Pass data of (x, y, weight), or override example_weights(batch).",
    "shuffle": "Shuffle the dataset; arrays are shuffled in every epoch.",
    "steps": TRAIN.format("steps="),
    "steps_per_execution": "Pass steps_per_loop=.",
    "summary_dir": "Pass model_dir=.",
    "summary_interval": "Pass log_interval=.",
    "train_actions": "Pass actions=, each an Action(call, every_steps=).",
    "train_data": "Pass the data to train().",
    "train_steps": TRAIN.format("steps="),
    "val_check_interval": TRAIN.format("eval_interval=, in steps,"),
    "validation_data": TRAIN.format("eval_data="),
    "validation_freq": TRAIN.format("eval_interval=, in steps,"),
    "weighted_metrics": "Pass metrics=, which are weighted.",
}

# The same for arguments of `Trainer.train`, where the answer differs.
TRAIN_ARGUMENTS = {
    "batch_size": "Pass global_batch=.",
    "callbacks": "Pass callbacks= or actions= to Trainer.",
    "ckpt_path": "Pass model_dir= to Trainer: the same command resumes; or init_from= for weights.",
    "class_weight": "Pass class_weight= to Trainer.",
    "datamodule": "Pass the data itself as train_data.",
    "initial_epoch": "Leave it out: a run with a model_dir= resumes where it was.",
    "max_epochs": "Pass epochs=.",
    "max_steps": "Pass steps=.",
    "sample_weight": "Pass data of (x, y, weight), or override example_weights(batch).",
    "shuffle": "Shuffle the dataset; arrays are shuffled in every epoch.",
    "steps_per_epoch": "Pass steps=, the number of all steps.",
    "train_dataloaders": "Pass the data as train_data.",
    "train_steps": "Pass steps=.",
    "val_dataloaders": "Pass eval_data=.",
    "validation_data": "Pass eval_data=.",
    "validation_freq": "Pass eval_interval=, in steps.",
    "validation_steps": "Pass eval_steps=.",
    "verbose": "Pass verbose= to Trainer.",
    "x": "Pass train_data=(x, y).",
    "y": "Pass train_data=(x, y).",
}

# The same for `Trainer.evaluate` and `Trainer.predict`.
DATA_ARGUMENTS = {
    "batch_size": "Pass global_batch=.",
    "callbacks": "Pass callbacks= to Trainer.",
    "sample_weight": "Pass data of (x, y, weight), or override example_weights(batch).",
}

# What to call instead of a method of this name.
METHODS = {
    "compile": "Pass optimizer=, loss_fn= and metrics= to Trainer.",
    "fit": "Call train((x, y), epochs=5, global_batch=64).",
    "get_weights": "Call model.get_weights().",
    "load_from_checkpoint": "Pass model_dir= or init_from=, or call evaluate().",
    "load_weights": "Pass init_from=.",
    "save": "Call export(path).",
    "save_weights": "Call export(path), or model.save_weights(path).",
    "summary": "Call model.summary().",
    "test": "Call evaluate(data).",
    "train_and_evaluate": "Call train(data, steps, eval_data=, eval_interval=).",
    "validate": "Call evaluate(data).",
}

# What to override instead of a method of this name, which no trainer would call.
OVERRIDDEN = {
    "configure_gradient_clipping": "Pass global_clipnorm=, clipnorm= or clipvalue=.",
    "configure_optimizers": "Override build_optimizer().",
    "eval_begin": "Override on_evaluate_end(step, results), or build_metrics().",
    "eval_end": "Override on_evaluate_end(step, results).",
    "eval_reduce": "Override build_metrics() and update_metrics(batch, aux).",
    "predict_step": "Override predict_batch(batch).",
    "test_dataloader": "Pass the data to evaluate().",
    "test_step": "Override compute_loss(batch, training) or eval_step(batch).",
    "train_dataloader": "Pass the data to train().",
    "train_loop_begin": "Override on_loop_begin(step).",
    "train_loop_end": "Override on_loop_end(step).",
    "training_step": "Override compute_loss(batch, training), which returns a loss per example.",
    "val_dataloader": "Pass eval_data= to train().",
    "validation_step": "Override compute_loss(batch, training) or eval_step(batch).",
}


def check_not_inputs_and_labels(steps: Any) -> None:
    """Raises TypeError if `train` was called as `train(x, y)`: `steps` holds data."""
    if hasattr(steps, "shape") and getattr(steps, "shape", ()) != ():
        raise TypeError(
            "`train_data` must hold inputs and labels together; got labels as a second argument, "
            "which is the number of steps. Shuffling and batching keep them together. Pass "
            "train((x, y), epochs=5, global_batch=64), for example."
        )


def check_one_batch(others: tuple[Any, ...]) -> None:
    """Raises TypeError if `train_on_batch` was called with labels as a second argument."""
    if others:
        raise TypeError(
            "`batch` must hold inputs, labels and weights together; got "
            f"{1 + len(others)} arguments. A batch has the structure that a dataset would yield. "
            "Pass train_on_batch((x, y)) or train_on_batch((x, y, weight))."
        )


def check_one_data_set(others: tuple[Any, ...]) -> None:
    """Raises TypeError if `evaluate` was called with labels as a second argument."""
    if others:
        raise TypeError(
            f"`data` must hold inputs and labels together; got {1 + len(others)} arguments. "
            "Batching keeps them together. Pass evaluate((x, y), global_batch=64), for example."
        )


def check_no_foreign_methods(cls: type) -> None:
    """Raises TypeError if a class defines a method of Lightning or Orbit, which nothing calls.

    Args:
        cls: a subclass of `Task`.
    """
    for name, remedy in OVERRIDDEN.items():
        if callable(getattr(cls, name, None)):
            raise TypeError(
                f"`{name}` must not be defined by a Trainer; got a method of {cls.__name__}. The "
                f"trainer would never call it. {remedy} A method that you call yourself needs "
                "another name."
            )


def no_such_method(cls: type, name: str) -> AttributeError:
    """Returns the error for a method of another library, a key of `METHODS`."""
    return AttributeError(f"{cls.__name__} has no method {name!r}. {METHODS[name]}")
