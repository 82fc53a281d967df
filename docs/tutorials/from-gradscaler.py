# %% [markdown]
# # From PyTorch's `GradScaler`
#
# A PyTorch loop with `autocast` and `GradScaler`, and the same loop with `LossScaler`, side by
# side. The numbers are the same. It takes about twenty seconds on two CPU cores, and needs PyTorch
# for the first half (`pip install -e '.[examples,plot,bench]'`). All counterparts are in [coming
# from `GradScaler`](../from-gradscaler.md).

# %%
import scaling  # isort: skip

import importlib.util

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

STEPS = 60
installed = importlib.util.find_spec("torch") is not None
scales = {}

# %% [markdown]
# ## In PyTorch
#
# A weight moves towards 3. The loss scale begins at 2^40, which is far too high for float16.

# %%
if installed:
    import torch

    weight = torch.nn.Parameter(torch.tensor(0.0))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    scales["GradScaler"] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (weight.half().float() - 3.0) ** 2
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales["GradScaler"].append(scaler.get_scale())
    print(f"weight {weight.item():.3f}  scale {scaler.get_scale():.0f}")

# %% [markdown]
# ## With `LossScaler`
#
# `scale` returns a token beside the loss, which holds the scale that this loss was multiplied by;
# `unscale` takes it. `update` moves the scale and returns the verdict, and the `if` is yours.

# %%
value = tf.Variable(0.0)
descent = keras.optimizers.SGD(0.1)
descent.build([value])
ours = scaling.LossScaler(scaling.preset("pytorch", initial_scale=2.0**40))


@tf.function
def step():
    with tf.GradientTape() as tape:
        half = tf.cast(value, tf.float16)
        scaled_loss, token = ours.scale((tf.cast(half, tf.float32) - 3.0) ** 2)
    gradients = ours.unscale(tape.gradient(scaled_loss, [value]), token)
    clipped, norm = tf.clip_by_global_norm(gradients, 1.0)
    apply = ours.update(scaling.all_finite([gradients, norm]))
    if apply:
        descent.apply(clipped, [value])


scales["LossScaler"] = []
for _ in range(STEPS):
    step()
    scales["LossScaler"].append(float(ours.loss_scale))
print(f"weight {value.numpy():.3f}  scale {ours.loss_scale:.0f}")
if installed:
    assert scales["GradScaler"] == scales["LossScaler"]
    assert abs(weight.item() - float(value)) < 1e-6

# %%
figure, axis = plt.subplots(figsize=(7, 2.5))
for (name, values), style in zip(scales.items(), ["-", "--"], strict=False):
    axis.step(range(STEPS), np.log2(values), style, where="post", label=name)
axis.set(xlabel="step", ylabel="log2 of the scale")
axis.legend()
plt.show()

# %% [markdown]
# ## What you get beside it
#
# A call out of order is an error, also while a graph is traced.

# %%
try:
    ours.unscale([tf.constant(1.0)], token=None)
except (TypeError, ValueError, RuntimeError) as error:
    print(type(error).__name__, error)

# %% [markdown]
# The rule behind it is a value. It can be tested without any model, and another one can be put in
# its place:

# %%
rule = scaling.preset("pytorch", growth_interval=2)
state = rule.initial_state()
for grads_finite in [False, True, True]:
    state = rule.advance(state, grads_finite)
    print(grads_finite, float(state.loss_scale))
