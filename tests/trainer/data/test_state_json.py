"""The state of a source as JSON."""

import numpy as np
import pytest

from trainer.data import state_json


def test_what_is_written_is_read():
    """Types, dtypes and shapes survive; a key need not be text."""
    state = {
        "at": (1, b"\x00\xff"),
        2: [None, 1.5, True, "text"],
        "array": np.arange(6, dtype=np.uint8).reshape(2, 3),
        "__kind__": "bytes",
    }
    found = state_json.loads(state_json.dumps(state))

    assert found.pop("array").tolist() == state.pop("array").tolist()
    assert found == state
    assert state_json.loads(state_json.dumps(np.float64(2))) == 2.0


@pytest.mark.extras
def test_tensors_of_pytorch():
    """A generator's state is a tensor, and comes back as one."""
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    state = torch.Generator().manual_seed(3).get_state()

    assert torch.equal(state_json.loads(state_json.dumps(state)), state)


def test_an_object_is_refused():
    """Objects would have to be pickled, and reading a pickle can run code."""
    with pytest.raises(TypeError, match=r"its state holds a builtins\.object"):
        state_json.dumps({"a": [object()]})
