"""The ranks of a node share one template, and with it the dataset. The death of one leaves the others as they are."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import psutil
import pytest

from tests.support.helpers import HANG_S, exhaustive, exhaustive_unless, wait_until
from tests.support.node_ranks import Node, Rank, node, reference, start_all

NUM_SAMPLES = 1200
NUM_RANKS = 3
ORDERS = list(itertools.permutations(range(NUM_RANKS)))

SHARES = "ranks share the dataset of process"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path) as made:
        yield made


def start(machine: Node, dataset: str = "Numbers", *arguments: object, num_ranks: int = NUM_RANKS) -> list[Rank]:
    """Start ranks that share a template."""
    ranks = machine.start(num_ranks, dataset, NUM_SAMPLES, *arguments)
    assert start_all(ranks) == [""] * num_ranks
    return ranks


def template_of(ranks: list[Rank]) -> int:
    """Return the template that all have."""
    (template,) = {int(rank.ask("template")) for rank in ranks}
    return template


def wait_until_ended(pids: list[int]) -> None:
    """Return once none of the processes exists."""
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), f"the end of {pids}")


def num_open_in(pid: int) -> int:
    """Return the number of descriptors of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_all_ranks_have_one_template_and_each_its_own_batches_and_environment(machine: Node) -> None:
    ranks = start(machine)
    template = template_of(ranks)
    for index, rank in enumerate(ranks):
        first = rank.ask("one")
        assert (set(first["rank"]), set(first["template"])) == ({index}, {template})
        assert [first["id"], *rank.ask("rest")] == reference(NUM_SAMPLES, index, NUM_RANKS)
        assert SHARES in rank.log
    assert len({rank.ask("payload") for rank in ranks}) == 1
    for rank in ranks[:-1]:
        rank.ask("close")
        assert psutil.pid_exists(template)
    ranks[-1].ask("close")
    assert not psutil.pid_exists(template)


@pytest.mark.slow
@pytest.mark.parametrize("order", exhaustive_unless([ORDERS[3]], ORDERS), ids=str)
def test_ranks_that_are_killed_in_any_order_take_no_worker_of_another_rank_along(
    machine: Node, order: tuple[int, ...]
) -> None:
    ranks = start(machine)
    template = template_of(ranks)
    taken = {index: rank.ask("take 5") for index, rank in enumerate(ranks)}
    num_open = num_open_in(template)
    for position, killed in enumerate(order[:-1]):
        left = order[position + 1 :]
        workers = {index: ranks[index].ask("workers") for index in left}
        of_killed = ranks[killed].ask("workers")
        ranks[killed].kill()
        wait_until_ended(of_killed)
        assert ranks[killed].rest_of_output() == ""  # it has an end: nobody else holds the stream
        for index in left:
            assert ranks[index].ask("workers") == workers[index]
            taken[index] += ranks[index].ask("take 5")
            taken[index] += ranks[index].replace_a_worker()
            assert "was ended by SIGKILL" in ranks[index].log
            taken[index] += ranks[index].ask("take 5")
        assert template_of([ranks[index] for index in left]) == template
    per_rank = 3 + 2  # the channel, a pidfd and stdout; and a pidfd for each worker
    wait_until(lambda: num_open_in(template) == num_open - 2 * per_rank, "the template to close what is left")
    last = order[-1]
    assert taken[last] + ranks[last].ask("rest") == reference(NUM_SAMPLES, last, NUM_RANKS)
    ranks[last].kill()
    machine.wait_until_gone()


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["template", exhaustive("keeper")])
def test_a_template_that_dies_is_replaced_by_another_one_for_all(machine: Node, whom: str) -> None:
    ranks = start(machine)
    template = template_of(ranks)
    taken = [rank.ask("take 5") for rank in ranks]
    num_open = [rank.ask("descriptors") for rank in ranks]
    victim = template if whom == "template" else psutil.Process(template).ppid()
    os.kill(victim, signal.SIGKILL)
    for index, rank in enumerate(ranks):
        assert taken[index] + rank.ask("rest") == reference(NUM_SAMPLES, index, NUM_RANKS)
    assert template_of(ranks) != template
    assert [rank.ask("descriptors") for rank in ranks] == num_open


@pytest.mark.slow
def test_a_rank_that_dies_while_the_dataset_is_built_delays_no_other(machine: Node, tmp_path: Path) -> None:
    path = tmp_path / "building"
    ranks = machine.start(NUM_RANKS, "WaitsForAFile", NUM_SAMPLES, str(path))
    ranks[0].tell("start")
    wait_until(path.is_dir, "the dataset being built")
    for rank in ranks[1:]:
        rank.tell("start")
    ranks[0].kill()
    (path / "go").touch()
    assert [rank.answer() for rank in ranks[1:]] == ["", ""]
    template_of(ranks[1:])
    assert ranks[2].ask("rest") == reference(NUM_SAMPLES, 2, NUM_RANKS)


@pytest.mark.slow
def test_nothing_is_left_of_ranks_that_die_while_c_code_builds_the_dataset(machine: Node, tmp_path: Path) -> None:
    path = tmp_path / "building"
    ranks = machine.start(2, "HoldsTheGil", NUM_SAMPLES, str(path))
    for rank in ranks:
        rank.tell("start")
    wait_until(path.is_dir, "the dataset being built")
    for rank in ranks:
        rank.kill()
    machine.wait_until_gone()


@pytest.mark.parametrize(
    ("dataset", "reason", "error"),
    [
        ("ReadsTheRank", "building it read LOCAL_RANK, which may differ from rank to rank", ""),
        exhaustive("OpensAFile", "building it opened descriptors", ""),
        exhaustive("Fails", "", "OSError: nothing is at /here"),
    ],
)
def test_a_dataset_that_cannot_be_shared_is_each_ranks_own(
    machine: Node, dataset: str, reason: str, error: str
) -> None:
    ranks = machine.start(2, dataset, NUM_SAMPLES, "/here")
    for index, answer in enumerate(start_all(ranks)):
        assert error in answer if error else not answer
        if not error:
            assert reason in ranks[index].log
            assert ranks[index].ask("rest") == reference(NUM_SAMPLES, index, 2)
    if not error:
        assert ranks[0].ask("template") != ranks[1].ask("template")


@pytest.mark.slow
def test_ranks_with_other_datasets_or_options_do_not_meet(machine: Node) -> None:
    ranks = start(machine, num_ranks=2)
    others = machine.start(2, "Others", NUM_SAMPLES)
    assert start_all(others) == ["", ""]
    assert template_of(ranks) != template_of(others)


@pytest.mark.slow
@pytest.mark.parametrize(("share", "num_templates"), [(True, 1), (False, 2), ("auto", 2)])
def test_runs_of_one_rank_share_only_if_the_user_says_so(machine: Node, share: bool | str, num_templates: int) -> None:
    ranks = machine.start(2, "Numbers", NUM_SAMPLES, world_size=1, share_dataset=share)
    assert start_all(ranks) == ["", ""]
    assert len({rank.ask("template") for rank in ranks}) == num_templates
    assert [rank.ask("rest") for rank in ranks] == [reference(NUM_SAMPLES, 0, 1)] * 2


@pytest.mark.slow
def test_what_a_constructor_prints_comes_out_once(tmp_path: Path) -> None:
    with node(tmp_path) as machine:
        ranks = machine.start(2, "Prints", NUM_SAMPLES)
        for rank in ranks:
            rank.tell("start")
        lines = []
        for rank in ranks:
            assert rank.process.stdout is not None
            while (line := rank.process.stdout.readline().strip()) != '""':
                lines.append(line)
    assert lines == ["printed while it is built"]


@pytest.mark.slow
def test_four_ranks_with_two_workers_each_hold_one_copy_of_a_dataset_of_1_gib(machine: Node) -> None:
    ranks = machine.start(4, "Large", 1024)
    assert start_all(ranks) == [""] * 4
    for rank in ranks:
        rank.tell("rest")
    assert len([rank.answer() for rank in ranks]) == 4
    trainers = {rank.process.pid for rank in ranks}
    held = sum(pss_of(process) for process in machine.processes() if process.pid not in trainers)
    assert held <= 1.2 * (1 << 30)


def pss_of(process: psutil.Process) -> int:
    """Return the proportional set size of a process in bytes."""
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


AS_ANOTHER_USER = """
import os, socket, sys
os.setuid(65534)
name = bytes.fromhex(sys.argv[1])
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
"""
CONNECTS = "sock.connect(name); print(sock.recv(100))"
LISTENS = "sock.bind(name); sock.listen(); print('listens', flush=True); sys.stdin.read()"

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")


def name_of(machine: Node) -> str:
    """Return the abstract socket where the ranks of this node meet. Other tests may have nodes of their own."""
    held = set()
    for process in machine.processes():
        with suppress(OSError):
            held |= {entry.readlink().name for entry in Path(f"/proc/{process.pid}/fd").iterdir()}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines() if "@swift_loader-" in line]
    (name,) = {name for *_, inode, name in lines if f"socket:[{inode}]" in held}
    return name


@pytest.mark.slow
@needs_root
def test_another_user_gets_no_answer(machine: Node) -> None:
    start(machine, num_ranks=2)
    name = name_of(machine)
    command = [sys.executable, "-c", AS_ANOTHER_USER + CONNECTS, name.replace("@", "\0", 1).encode().hex()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG_S)
    assert done.stdout == "b''\n"


@pytest.mark.slow
@needs_root
def test_a_name_that_another_user_has_taken_is_not_trusted(machine: Node) -> None:
    ranks = start(machine, num_ranks=2)
    name = name_of(machine)
    for rank in ranks:
        rank.kill()
    machine.wait_until_gone()
    command = [sys.executable, "-c", AS_ANOTHER_USER + LISTENS, name.replace("@", "\0", 1).encode().hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "listens\n"
        ranks = start(machine, num_ranks=2)
        other.kill()
    for index, rank in enumerate(ranks):
        assert "a process of another user (uid 65534) has taken the name" in rank.log
        assert rank.ask("rest") == reference(NUM_SAMPLES, index, 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_start_and_die_at_random_moments_leave_the_last_one_exact(machine: Node, seed: int) -> None:
    random = Random(seed)
    ranks = machine.start(5, "Numbers", NUM_SAMPLES)
    order = random.sample(ranks, len(ranks))
    for rank in order:
        rank.tell("start")
    for rank in order[:-1]:
        threading.Event().wait(random.expovariate(5))
        rank.kill()
    last = order[-1]
    assert last.answer() == ""
    assert last.ask("rest") == reference(NUM_SAMPLES, ranks.index(last), 5)
    last.kill()
    machine.wait_until_gone()
