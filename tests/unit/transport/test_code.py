"""Code that travels by value, within one process. Whole scripts: `tests/system/test_script_definitions.py`."""

from __future__ import annotations

import importlib.util
import os
import pickle
import sqlite3
import sys
import threading
import types
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch

from swift_loader.errors import EncodeError
from swift_loader.transport.arena import Arena
from swift_loader.transport.by_value import Definitions, travels_by_value
from swift_loader.transport.codec import decode, decode_with_code, encode, encode_with_code


@pytest.fixture(autouse=True)
def _main_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


def script(code: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the globals of a script that was run."""
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec(code, vars(module))
    return vars(module)


def carried(content: object) -> Any:
    return carried_with_things(content)[0]


def carried_with_things(content: object) -> tuple[Any, list[object], list[object]]:
    ours = Definitions()
    encoded, arena = encode_with_code(content, ours.add)
    memory = np.empty(arena.used, np.uint8)
    arena.move_to(memory)
    arrived, theirs = decode_with_code(memoryview(encoded.meta), encoded.num_blocks, memory)
    return arrived, [ours[number] for number in range(len(ours))], theirs


def test_what_can_be_imported_brings_no_code_along() -> None:
    arrived, ours, theirs = carried_with_things({"a": [1, threading.Lock(), json_like]})
    assert arrived["a"][2] is json_like
    assert ours == theirs == []


def json_like() -> None: ...


def test_the_copies_have_the_same_numbers_and_share_what_was_shared() -> None:
    class Base:
        counter = 3

    class Derived(Base):
        def __init__(self, x: int) -> None:
            super().__init__()
            self.x = x

    def make() -> Derived:
        return Derived(Base.counter)

    (arrived, instance), ours, theirs = carried_with_things([make, Derived(5)])
    assert len(ours) == len(theirs)
    copies: list[Any] = [theirs[ours.index(thing)] for thing in (make, Base, Derived)]
    made = copies[0]()
    assert arrived is copies[0]
    assert type(made) is type(instance) is copies[2] is not Derived
    assert type(made).__mro__[1] is copies[1]
    assert (made.x, instance.x) == (3, 5)


def test_a_function_that_is_made_anew_each_time_it_is_sent_does_not_go_on_for_ever() -> None:
    class Anew:
        num_sent = 0

        def __reduce__(self) -> Any:
            Anew.num_sent += 1
            if Anew.num_sent > 20:
                pytest.fail("it is sent again and again")
            return (lambda: 3), ()

    thing = Anew()

    def refers() -> object:
        return thing

    assert carried(refers)() == 3


def test_what_globals_and_content_share_stays_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    names = script("TABLE = {}\ndef put(x): TABLE[x] = 1\ndef get(): return sorted(TABLE)", monkeypatch)
    put, get, table = carried([names["put"], names["get"], names["TABLE"]])
    put("a")
    assert get() == sorted(table) == ["a"]
    assert names["TABLE"] == {}


def test_arrays_of_globals_and_content_are_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names = script("import numpy as np\nDATA = np.zeros(1000)\ndef get(): return DATA", monkeypatch)
    encoded, arena = encode_with_code([names["get"], names["DATA"]], Definitions().add)
    assert arena.used < 2 * 8000
    assert len(encoded.meta) < 8000


def test_a_class_is_complete_before_its_instances_are_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
class Key:
    table = {"a": 1}
    def __init__(self, x): self.x = x
    def __hash__(self): return hash(self.x) + offset()
    def __eq__(self, other): return self.x == other.x
    def __setstate__(self, state):
        self.__dict__.update(state)
        self.seen = self.table["a"]
def offset(): return OFFSETS[0]
OFFSETS = [7]
"""
    names = script(code, monkeypatch)
    key = names["Key"]("b")
    arrived = carried({key: [key]})
    ((copy, value),) = arrived.items()
    assert value[0] is copy
    assert copy.seen == 1
    assert arrived[type(copy)("b")] is value


@pytest.mark.parametrize("held", [True, False])
def test_locks_arrive_free(held: bool) -> None:
    locks: list[Any] = [threading.Lock(), threading.RLock(), threading.Condition(), threading.BoundedSemaphore(1)]
    for lock in locks if held else []:
        lock.acquire()
    for lock, arrived in zip(locks, carried(locks), strict=True):
        assert type(arrived) is type(lock)
        assert arrived.acquire(timeout=5) if not isinstance(lock, threading.Condition) else arrived.acquire()
        arrived.release()


def test_a_variable_that_is_used_and_cannot_be_sent_is_named_with_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    names = script("connection = None\ndef load(index): return connection.execute(index)", monkeypatch)
    names["connection"] = sqlite3.connect(":memory:")
    expected = "the global variable 'connection', which the function load uses, is a sqlite3.Connection, which can't"
    with pytest.raises(EncodeError, match=expected):
        carried([names["load"]])
    names["connection"].close()


def test_a_variable_that_nobody_uses_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    names = script("connection = None\nx = 3\ndef load(): return x, sorted(globals())", monkeypatch)
    with open(os.devnull, "rb") as names["connection"]:
        x, variables = carried(names["load"])()
    assert x == 3
    assert "x" in variables
    assert "connection" not in variables


def test_a_variable_of_a_closure_and_an_attribute_of_a_class_are_named() -> None:
    generator = (number for number in range(3))

    def stuck() -> Any:
        return generator

    class Holder:
        numbers = generator

    with pytest.raises(EncodeError, match=r"the variable 'generator', which the function .*stuck uses.*imported"):
        carried(stuck)
    with pytest.raises(EncodeError, match=r"the attribute 'numbers' of the class .*Holder is a generator"):
        carried(Holder)


def test_a_default_that_cannot_be_sent_is_named() -> None:
    def stuck(x: Any = (number for number in range(3))) -> Any:
        return x

    with pytest.raises(
        EncodeError,
        match=r"a default or an attribute of the function .*stuck holds at .*a generator, which can't be sent",
    ):
        carried(stuck)


def test_the_script_is_main_where_it_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    names = script("__file__ = '/a/script.py'\nclass Point: pass\ndef where(): return __file__", monkeypatch)
    point, where = carried([names["Point"], names["where"]])
    assert where() == "/a/script.py"
    assert type(pickle.loads(pickle.dumps(point()))) is point
    assert not hasattr(sys.modules["__main__"], "__file__")  # or multiprocessing would run it


def test_a_library_hook_that_refuses_an_empty_class_is_passed_by() -> None:
    class Child(Picky, tag="t"):
        def get(self) -> str:
            return self.label

    assert carried(Child)().get() == "t!"
    assert carried(Child).__bases__ == (Picky,)


class Picky:
    label: str

    def __init_subclass__(cls, tag: str) -> None:
        cls.label = tag + "!"


def test_code_that_the_receiver_does_not_know_comes_with_a_batch() -> None:
    class Known: ...

    class New:
        def __init__(self) -> None:
            self.known = Known

        def __repr__(self) -> str:
            return f"New {LIST}"

    definitions = Definitions([Known])
    arena = Arena(np.empty(0, np.uint8))
    batch = [np.arange(10), New(), lambda: 5, torch.arange(3)]
    encoded = encode(batch, arena, definitions.number_of)
    memory = np.empty(arena.used, np.uint8)
    arena.move_to(memory)
    arrived: Any = decode(memoryview(encoded.meta), encoded.num_blocks, memory, definitions)
    assert arrived[0].tolist() == list(range(10))
    assert repr(arrived[1]) == "New [1]"
    assert arrived[1].known is Known
    assert arrived[2]() == 5


LIST = [1]


@pytest.mark.parametrize("mode", ["r", "r+", "w+"])
def test_a_memmap_is_sent_by_its_files_name(mode: Any, tmp_path: Path) -> None:
    whole = np.memmap(tmp_path / "a", np.int32, "w+", shape=(1000, 100))
    whole[:] = np.arange(100_000).reshape(1000, 100)
    whole.flush()
    ours = whole if mode == "w+" else np.memmap(tmp_path / "a", np.int32, mode, 400, (999, 100))
    parts = {"all": ours, "part": ours[5:7], "columns": ours[::3, ::-2], "item": ours[3:4, 2], "t": ours.T}
    encoded, arena = encode_with_code(parts, Definitions().add)
    assert arena.used == 0
    assert len(encoded.meta) < 3000
    arrived = carried(parts)
    for name, part in parts.items():
        assert np.array_equal(arrived[name], part), name
        assert (type(arrived[name]), arrived[name].strides) == (np.memmap, part.strides)
        assert arrived[name].flags.writeable == (mode != "r")
    if mode != "r":
        arrived["all"][0, 0] = -7
        assert ours[0, 0] == -7


def test_a_memmap_whose_file_is_gone_or_replaced_is_sent_as_it_is(tmp_path: Path) -> None:
    ours = np.memmap(tmp_path / "a", np.int32, "w+", shape=(10,))
    ours[:] = 5
    (tmp_path / "a").unlink()
    assert carried(ours).tolist() == [5] * 10
    (tmp_path / "a").write_bytes(b"\0" * 40)
    assert carried(ours).tolist() == [5] * 10


def test_what_was_written_to_a_private_memmap_arrives(tmp_path: Path) -> None:
    np.zeros(10, np.int32).tofile(tmp_path / "a")
    ours = np.memmap(tmp_path / "a", np.int32, "c")
    ours[:] = 5
    assert carried(ours).tolist() == [5] * 10


def test_an_instance_is_rebuilt_after_all_that_its_class_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
class Key:
    def __init__(self, x): self.x = x
    def __hash__(self): return offset() + hash(self.x)
    def __eq__(self, other): return self.x == other.x
TABLE = {}
def offset(): return LATER.value
class Number:
    def __init__(self, value): self.value = value
    def __setstate__(self, state): self.__dict__.update(state); self.scale = SCALES[0]
LATER = Number(7)
SCALES = [2]
TABLE[Key("a")] = 1
def get(): return TABLE[Key("a")], LATER.scale
"""
    names = script(code, monkeypatch)
    assert carried(names["get"])() == (1, 2)


@pytest.mark.parametrize("kind", ["dict", "weakref.WeakValueDictionary", "lambda: collections.defaultdict(list)"])
def test_what_is_interned_in_its_own_class_is_rebuilt_with_the_table_there(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"""
import collections, weakref
class Symbol:
    table = ({kind})()
    def __new__(cls, name):
        if name not in cls.table:
            self = super().__new__(cls)
            self.name = name
            cls.table[name] = self
        return cls.table[name]
    def __reduce__(self): return Symbol, (self.name,)
A, B = Symbol("a"), Symbol("b")
AFTER = [A, [B], B]
def get(): return Symbol("a") is A, AFTER[1][0] is AFTER[2] is B, list(Symbol.table), A.name
"""
    assert carried(script(code, monkeypatch)["get"])() == (True, True, ["a", "b"], "a")


def test_the_only_instance_of_a_class_is_rebuilt_by_the_code_that_looks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
class Config:
    instance = None
    def __new__(cls):
        if cls.instance is None:
            cls.instance = super().__new__(cls)
        return cls.instance
Config().size = 3
class Logger:
    def __reduce__(self): return get_logger, ()
LOGGER = None
def get_logger():
    global LOGGER
    if LOGGER is None:
        LOGGER = Logger()
    return LOGGER
USED = [get_logger()]
class Point:
    scale, names = 3, ("x",)
    def __init__(self, x): self.x = x
    def __setstate__(self, state): self.__dict__.update(state); self.zero = type(self).zero
    def __eq__(self, other): return self.x == other.x
    def __hash__(self): return hash([getattr(self, name) for name in self.names][0] * self.scale)
Point.zero = Point(0)
Point.by_name = {Point(1): "one"}
def get(): return Config().size, get_logger() is USED[0], Point.by_name[Point(1)], Point.zero.x
"""
    assert carried(script(code, monkeypatch)["get"])() == (3, True, "one", 0)


def test_a_registry_of_code_is_there_before_what_is_rebuilt_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
class Shape:
    kinds = {}
    def __reduce__(self): return Shape.make, (type(self).__name__,)
    @staticmethod
    def make(name): return Shape.kinds[name]()
class Square(Shape): owner = Shape
Shape.kinds["Square"] = Square
Shape.first = Square()
def get(): return type(Shape.first) is Square, Shape.kinds["Square"] is Square
"""
    assert carried(script(code, monkeypatch)["get"])() == (True, True)


def test_a_module_that_cannot_be_imported_comes_with_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_plugin.py").write_text("""
class Point:
    table = {}
    def __init__(self, x): self.x = x
def count(): global calls; calls += 1; return calls
calls, text = 0, __name__
""")
    spec = importlib.util.spec_from_file_location("a_plugin", tmp_path / "a_plugin.py")
    assert spec is not None
    assert spec.loader is not None
    plugin: Any = importlib.util.module_from_spec(spec)
    by_hand: Any = types.ModuleType("by_hand.inner")
    exec("def twice(x): return 2 * x + zero()\ndef zero(): return 0", vars(by_hand))
    for module in (plugin, by_hand):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    spec.loader.exec_module(plugin)
    code = """
import a_plugin, sys
from a_plugin import Point, count
def get(): return [count(), a_plugin.calls, Point(3).x, type(POINT) is Point is a_plugin.Point, a_plugin.text, twice(2)]
POINT, twice = Point(1), sys.modules["by_hand.inner"].twice
"""
    ours = Definitions()
    encoded, _ = encode_with_code(script(code, monkeypatch)["get"], ours.add)
    for name in ("a_plugin", "by_hand.inner"):
        monkeypatch.delitem(sys.modules, name)
    (get, things) = decode_with_code(memoryview(encoded.meta), encoded.num_blocks, np.empty(0, np.uint8))
    assert get() == [1, 1, 3, True, "a_plugin", 4]
    assert get()[:2] == [2, 2]
    assert plugin.calls == 0
    made = [thing for thing in things if isinstance(thing, type)]
    assert all(travels_by_value(thing) for thing in made)  # there as here
    assert [thing.__name__ for thing in made] == ["Point"]


def test_what_only_hints_name_is_sent_if_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
from __future__ import annotations
import dataclasses, typing
from pathlib import Path
class Size: pass
stuck = (number for number in range(3))
@dataclasses.dataclass
class Options:
    root: Path = None
    sizes: typing.Optional[dict[str, Size]] = None
def load(path: Path, size: "Size") -> None: return path
def other(x: stuck, y: "no hint" = 1): return x
def get(): return [sorted(map(repr, typing.get_type_hints(thing).values())) for thing in (Options, load)]
def get_other(): return other(3)
def use(): return get_other() + len(stuck)
"""
    names = script(code, monkeypatch)
    assert carried(names["get"])() == names["get"]()
    assert carried(names["get_other"])() == 3
    with pytest.raises(EncodeError, match=r"the global variable 'stuck', which the function use uses, is a generator"):
        carried(names["use"])


def test_structures_and_libraries_of_c_code_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import ctypes, struct
class Header(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("tag", ctypes.c_byte), ("size", ctypes.c_int), ("both", ctypes.c_short * 2)]
    def double(self): return 2 * self.size
class Value(ctypes.Union):
    _fields_ = [("i", ctypes.c_int), ("f", ctypes.c_float)]
class Node(ctypes.Structure): pass
Node._fields_ = [("x", ctypes.c_int), ("next", ctypes.POINTER(Node))]
Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)
Array = ctypes.c_int * 3
HEADER = Header(1, 5, (2, 3))
math = ctypes.CDLL("libm.so.6", use_errno=True)
math.sqrt.restype, math.sqrt.argtypes = ctypes.c_double, [ctypes.c_double]
PACKER = struct.Struct("<iH")
VIEW = memoryview(bytearray(range(8))).cast("h")
def get():
    node = Node(3, ctypes.pointer(Node(4)))
    return [ctypes.sizeof(Header), HEADER.double(), list(HEADER.both), Value(i=7).i, node.next.contents.x,
            Callback(lambda x: x + 1)(2), list(Array(1, 2)), math.sqrt(9.0), PACKER.pack(1, 2), VIEW.tolist(),
            VIEW.format, VIEW.readonly]
"""
    names = script(code, monkeypatch)
    assert carried(names["get"])() == names["get"]()


def test_a_class_that_cannot_be_taken_apart_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
class Meta(type): pass
class Stuck:
    __slots__ = Meta("Names", (), {"__iter__": lambda self: iter("ab"), "__reduce__": lambda self: 1 / 0})()
def get(): return Stuck
"""
    with pytest.raises(EncodeError, match=r"the global variable 'Stuck' can't be sent .*ZeroDivisionError"):
        carried(script(code, monkeypatch)["get"])


def test_a_queue_that_would_lose_what_is_in_it_is_refused() -> None:
    queue: SimpleQueue[int] = SimpleQueue()
    assert carried({"queue": queue, "code": lambda: 1})["queue"].empty()
    queue.put(1)
    with pytest.raises(Exception, match="isn't empty"):
        carried({"queue": queue, "code": lambda: 1})


def test_a_cache_over_a_partial_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import functools
def add(a, b): return a + b
plus_one = functools.lru_cache(functools.partial(add, 1))
def get(x): return plus_one(x)
"""
    assert carried(script(code, monkeypatch)["get"])(2) == 3


def test_a_function_has_its_own_variables_where_multiprocessing_has_copied_the_scripts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy = script("X = 1\nclass Sample: pass", monkeypatch)
    monkeypatch.setitem(sys.modules, "__mp_main__", sys.modules["__main__"])
    copy["__name__"] = "__mp_main__"
    own = copy | {"X": 2}
    exec("def get(): return X, Sample", own)
    instance, get = carried([copy["Sample"](), own["get"]])
    assert get() == (2, type(instance))
