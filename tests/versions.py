"""What differs between the versions of TensorFlow that halfstep supports."""

import tensorflow as tf

# Before TensorFlow 2.21, XLA casts float32 to float8 by way of float16: see docs/float8.md.
XLA_ROUNDS_ONCE = tuple(map(int, tf.__version__.split(".")[:2])) >= (2, 21)
