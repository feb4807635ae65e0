"""Which lines of the user's code take the time."""

from __future__ import annotations

from swift_loader.doctor.facts import Line
from swift_loader.doctor.probes.own_code import is_users_file
from swift_loader.doctor.rules.lines import line_in_dump, line_of, line_shares, users_files

IS_USERS = users_files(["/usr/lib/python3/"])
OWN, LIBRARY, STANDARD = (
    Line("/home/me/data.py", 3, "__getitem__"),
    Line("/home/me/.venv/lib/site-packages/PIL/Image.py", 9, "load"),
    Line("/usr/lib/python3/json.py", 5, "loads"),
)

DUMP = """\
Fatal Python error: Segmentation fault

Thread 0x00007f (most recent call first):
  File "/home/me/other.py", line 1 in wait

Current thread 0x00008f (most recent call first):
  File "/usr/lib/python3/json.py", line 5 in loads
  File "/home/me/data.py", line 3 in __getitem__
  File "/home/me/train.py", line 8 in main
"""


def test_a_call_of_a_library_counts_for_the_line_that_makes_it() -> None:
    assert line_of([LIBRARY, STANDARD, OWN], IS_USERS) == OWN


def test_a_dataset_of_a_library_counts_for_its_own_method() -> None:
    assert line_of([STANDARD, LIBRARY], IS_USERS) == LIBRARY
    assert line_of([], IS_USERS) is None


def test_shares_are_of_all_hits_and_sorted() -> None:
    hits = {OWN: 1, LIBRARY: 3}
    assert [(one.line, one.share) for one in line_shares(hits)] == [(LIBRARY, 0.75), (OWN, 0.25)]
    assert line_shares({}) == ()


def test_this_test_is_the_users_code_and_the_package_is_not() -> None:
    assert is_users_file(__file__)
    assert not is_users_file(Line.__init__.__code__.co_filename)
    assert not is_users_file("<frozen importlib._bootstrap>")


def test_the_users_line_is_found_in_what_faulthandler_wrote() -> None:
    assert line_in_dump(DUMP, IS_USERS) == OWN
    assert line_in_dump("sample 3\nsample 4\n", IS_USERS) is None
