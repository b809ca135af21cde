"""For the tests of users and of third-party backends. May import anything.

Read: contract, fake, simulated_device, threaded_device
"""

from gd_plugin.testing.contract import CONTRACT_CHECKS, ContractError, check_same_masks
from gd_plugin.testing.fake import FakeBackend, FakeMatcher, create_fake_backend
from gd_plugin.testing.simulated_device import SimulatedDeadlock, SimulatedDevice, SimulatedDeviceError
from gd_plugin.testing.threaded_device import ThreadedDevice, build_fake_driver

__all__ = [
    "CONTRACT_CHECKS",
    "ContractError",
    "FakeBackend",
    "FakeMatcher",
    "SimulatedDeadlock",
    "SimulatedDevice",
    "SimulatedDeviceError",
    "ThreadedDevice",
    "build_fake_driver",
    "check_same_masks",
    "create_fake_backend",
]
