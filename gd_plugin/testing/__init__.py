"""For the tests of users and of third-party backends. May import anything.

Read: contract, fake
"""

from gd_plugin.testing.contract import CONTRACT_CHECKS, ContractError, check_same_masks
from gd_plugin.testing.fake import FakeBackend, FakeMatcher, create_fake_backend

__all__ = [
    "CONTRACT_CHECKS",
    "ContractError",
    "FakeBackend",
    "FakeMatcher",
    "check_same_masks",
    "create_fake_backend",
]
