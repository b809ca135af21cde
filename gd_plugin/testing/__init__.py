"""For the tests of users and of third-party backends. May import anything.

Read: contract
"""
