"""The cards that the step is compiled for: what XLA has to know of a card that is not there.

The figures are NVIDIA's, as XLA reports them on such a card. `peak` is the rate of dense products in
FLOP per second, from NVIDIA's data sheets: in half precision, and in float32 by TensorFloat-32.
"""

from typing import NamedTuple

DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared_memory_per_core} threads_per_core_limit: 2048
  core_count: {core_count} fpus_per_core: {fpus_per_core} block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: {memory_bandwidth}
  l2_cache_size: {l2_cache_size} clock_rate_ghz: {clock_rate_ghz}
  device_memory_size: {device_memory_size}
  shared_memory_per_block_optin: {shared_memory_per_block_optin}
  cuda_compute_capability {{ major: {capability} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  driver_version: "{driver}" runtime_version: "12.8.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{name}"
"""


class Card(NamedTuple):
    """A card, in the fields of XLA's description of a device."""

    name: str
    capability: int
    core_count: int
    fpus_per_core: int
    clock_rate_ghz: float
    memory_bandwidth: int
    device_memory_size: int
    l2_cache_size: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int
    peak: dict  # by dtype
    driver: str = "12.8.0"

    def description(self):
        """Returns the card as a `GpuTargetConfigProto` in text form."""
        return DESCRIPTION.format(**self._asdict())


def card_of(name):
    """Returns a card by name; `H100:12.2.0` is an H100 with that version of the driver."""
    name, _, driver = name.partition(":")
    card = CARDS[name]
    return card._replace(driver=driver) if driver else card


HOPPER = {
    "capability": 9,
    "core_count": 132,
    "fpus_per_core": 128,
    "clock_rate_ghz": 1.98,
    "l2_cache_size": 52428800,
    "shared_memory_per_core": 233472,
    "shared_memory_per_block_optin": 232448,
    "peak": {"float16": 989e12, "bfloat16": 989e12, "float32": 495e12},
}
H100 = Card(
    name="NVIDIA H100 80GB HBM3",
    memory_bandwidth=3352320000000,
    device_memory_size=84942979072,
    **HOPPER,
)
CARDS = {
    "A100": Card(
        name="NVIDIA A100-SXM4-80GB",
        capability=8,
        core_count=108,
        fpus_per_core=64,
        clock_rate_ghz=1.41,
        memory_bandwidth=2039040000000,
        device_memory_size=85100068864,
        l2_cache_size=41943040,
        shared_memory_per_core=167936,
        shared_memory_per_block_optin=166912,
        peak={"float16": 312e12, "bfloat16": 312e12, "float32": 156e12},
    ),
    "H100": H100,
    "H200": Card(
        name="NVIDIA H200 141GB HBM3e",
        memory_bandwidth=4800000000000,
        device_memory_size=151397597184,
        **HOPPER,
    ),
}
