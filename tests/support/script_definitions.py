"""Definitions as scripts hold them: the table of what must work with any number of workers.

Each is the middle of a script: `sample(index)` gives the samples of a dataset, unless the script has a `Dataset` of its
own. `check(batch)`, where there is one, runs in the trainer.
"""

from __future__ import annotations

import textwrap

_BEGINNING = """
import os, sys
from swift_loader import SwiftLoader
OPTIONS = {}
def check(batch): pass
class Dataset:
    def __len__(self): return 6
    def __getitem__(self, index): return sample(index)
"""

_ENDING = """
ways = {
    "inline": {"worker_per_consumer": 0},
    "template": {"worker_per_consumer": 2},
    "spawn": {"worker_per_consumer": 1, "start_method": "spawn"},
}
def run(way):
    source = {} if "dataset" in OPTIONS else {"dataset_class": Dataset}
    with SwiftLoader(**source, **OPTIONS, **ways[way], batch_size=3, seed=1) as loader:
        for batch in loader:
            check(batch)
            print(repr(batch))
for way in sys.argv[1:] or ways:
    print("way", way, flush=True)
    child = os.fork()
    if not child:
        status = 1
        try:
            run(way)
            status = 0
        finally:
            if status:
                sys.excepthook(*sys.exc_info())
            sys.stdout.flush()
            os._exit(status)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{way} failed")
"""

_FUTURE = "from __future__ import annotations"


def as_script(definition: str) -> str:
    """Return the whole script, which prints each way's batches."""
    body = textwrap.dedent(definition).strip()
    future = ""
    if body.startswith(_FUTURE):
        future, body = _FUTURE + "\n", body[len(_FUTURE) :]
    return f"{future}{_BEGINNING}\n{body}\n{_ENDING}"


DEFINITIONS = {
    # Modules ----------------------------------------------------------------------------------------------------------
    "import PIL.Image": """
        import numpy as np, PIL.Image
        def sample(index): return np.asarray(PIL.Image.new("RGB", (4, 4), (index, 2, 3)))
    """,
    "import xml.etree.ElementTree": """
        import xml.etree.ElementTree
        def sample(index): return [xml.etree.ElementTree.fromstring(t).text for t in [f"<a>{index}</a>"]][0]
    """,
    "import a.b as c": """
        import xml.dom.minidom as dom, os.path as op
        def sample(index): return dom.parseString(f"<a>{index}</a>").documentElement.toxml() + op.sep
    """,
    "a package kept by an instance": """
        import xml
        import xml.sax.saxutils
        class Holder:
            def __init__(self): self.package = xml
            def escape(self, text): return self.package.sax.saxutils.escape(text)
        holder = Holder()
        def sample(index): return holder.escape(f"<{index}>")
    """,
    "a submodule that only a nested function uses": """
        import xml.sax.saxutils
        def sample(index):
            def inner():
                return (lambda: xml.sax.saxutils.escape(f"<{index}>"))()
            return inner()
    """,
    # Enums ------------------------------------------------------------------------------------------------------------
    "an Enum with a constructor of its own": """
        from enum import Enum
        class Planet(Enum):
            MERCURY = (3.3, 2.4)
            EARTH = (5.9, 6.3)
            def __init__(self, mass, radius): self.mass, self.radius = mass, radius
            @property
            def density(self): return self.mass / self.radius
        class Coded(Enum):
            A = "a", 1
            B = "b", 2
            def __new__(cls, value, code):
                member = object.__new__(cls)
                member._value_, member.code = value, code
                return member
        def sample(index): return [Planet.EARTH.density, Planet((3.3, 2.4)).mass, Coded("b").code, Coded.A.value]
    """,
    "members of an Enum as samples": """
        from enum import Enum
        class Color(Enum):
            RED = 1
            BLUE = 2
        def sample(index): return {"color": Color(1 + index % 2)}
        def check(batch): assert all(color in (Color.RED, Color.BLUE) for color in batch["color"])
    """,
    # Typing -----------------------------------------------------------------------------------------------------------
    "a generic dataset": """
        from typing import Generic, TypeVar
        from torch.utils.data import Dataset as Base
        T = TypeVar("T", covariant=True)
        class Dataset(Base[T]):
            def __len__(self): return 6
            def __getitem__(self, index): return index * 2
    """,
    "NamedTuple, both kinds": """
        import collections, typing
        Point = collections.namedtuple("Point", "x y", defaults=[7])
        class Named(typing.NamedTuple):
            x: int
            y: float = 2.5
            def total(self): return self.x + self.y
        class Sub(Point):
            def total(self): return super().__new__(Sub, 1).y + self.x
        def sample(index): return Named(index), Point(index), Sub(index).total(), Named(index).total()
        def check(batch): assert type(batch[0]) is Named and type(batch[1]) is Point
    """,
    "TypedDict, NewType, ParamSpec and Annotated": """
        import typing
        P = typing.ParamSpec("P")
        UserId = typing.NewType("UserId", int)
        class Movie(typing.TypedDict, total=False):
            name: str
        Meters = typing.Annotated[float, "m"]
        def sample(index) -> "Meters": return [UserId(index), Movie(name="a")["name"], repr(Meters), repr(P)]
    """,
    "type hints under from __future__ import annotations": """
        from __future__ import annotations
        import typing
        from dataclasses import dataclass
        @dataclass
        class Node:
            x: int
            child: Node | None = None
        def sample(index: int) -> Node: return sorted(typing.get_type_hints(Node)) + [Node(index, Node(2)).child.x]
    """,
    # Dataclasses and the like -----------------------------------------------------------------------------------------
    "dataclasses": """
        import dataclasses
        from dataclasses import dataclass, field
        @dataclass(frozen=True, order=True)
        class Key:
            name: str
            number: int = 3
        @dataclass(slots=True)
        class Slotted:
            x: int
            y: list = field(default_factory=list)
        @dataclass(kw_only=True)
        class Options(Slotted):
            z: int = dataclasses.field(default=4, metadata={"a": 1})
        TABLE = {Key("a"): 1, Key("b", 2): 2}
        def sample(index):
            return [TABLE[Key("a")], sorted(TABLE)[0].number, Options(x=index).y, repr(Slotted(index)),
                    dataclasses.replace(Options(x=1, z=9)).z, dataclasses.asdict(Options(x=index))["x"],
                    dataclasses.fields(Slotted)[0].default is dataclasses.MISSING]
    """,
    "dataclasses as samples": """
        from dataclasses import dataclass
        @dataclass
        class Point:
            x: int
        class Other:
            def __init__(self, x): self.x = x
            def __repr__(self): return f"Other({self.x})"
        def sample(index): return {"point": Point(index), "other": Other(index)}
        def check(batch):
            assert isinstance(batch["point"], Point)
            assert all(isinstance(other, Other) for other in batch["other"])
    """,
    "ABC": """
        import abc
        class Shape(abc.ABC):
            @abc.abstractmethod
            def area(self): ...
            @property
            @abc.abstractmethod
            def name(self): ...
        class Square(Shape):
            name = "square"
            def area(self): return 4
        @Shape.register
        class Foreign: pass
        def sample(index):
            try: Shape()
            except TypeError as error: reason = str(error)[:20]
            return [Square().area(), isinstance(Square(), Shape), issubclass(Foreign, Shape), reason]
    """,
    "pydantic models": """
        import pydantic
        class Inner(pydantic.BaseModel):
            x: int = 3
            @pydantic.field_validator("x")
            @classmethod
            def positive(cls, value): return abs(value)
        class Model(pydantic.BaseModel):
            inner: Inner = Inner()
            many: list[Inner] = pydantic.Field(default_factory=list)
            model_config = pydantic.ConfigDict(frozen=True)
        def sample(index): return Model(inner={"x": -index}, many=[{"x": 1}]).model_dump_json()
    """,
    # Classes that register themselves ---------------------------------------------------------------------------------
    "a metaclass that registers": """
        REGISTRY = {}
        class Meta(type):
            def __new__(mcs, name, bases, namespace, **options):
                assert "kind" in namespace, "a class without kind"
                cls = super().__new__(mcs, name, bases, namespace)
                assert name not in REGISTRY, "registered twice"
                REGISTRY[name] = cls
                return cls
            def __call__(cls, *args): return super().__call__(*args)
            @property
            def label(cls): return cls.kind.upper()
        class A(metaclass=Meta):
            kind = "a"
        class B(A):
            kind = "b"
        def sample(index): return [REGISTRY["B"]().kind, B.label, REGISTRY["A"] is A, sorted(REGISTRY)]
    """,
    "__init_subclass__ that registers": """
        class Plugin:
            registry = {}
            def __init_subclass__(cls, *, key, **rest):
                super().__init_subclass__(**rest)
                assert key not in Plugin.registry, "registered twice"
                Plugin.registry[key] = cls
                cls.key = key
        class One(Plugin, key="one"):
            def go(self): return 1
        class Two(Plugin, key="two"):
            def go(self): return super().__class__.__name__
        def sample(index):
            class Late(Plugin, key=f"late {index} {len(Plugin.registry)}"): pass
            del Plugin.registry[Late.key]
            return [Plugin.registry["one"]().go(), Two().go(), Two.key, sorted(Plugin.registry)]
    """,
    # Functions --------------------------------------------------------------------------------------------------------
    "decorators with closures": """
        import functools
        def times(factor):
            calls = 0
            def decorate(function):
                @functools.wraps(function)
                def wrapper(*args):
                    nonlocal calls
                    calls += 0 * factor
                    return factor * function(*args)
                wrapper.count = lambda: calls
                return wrapper
            return decorate
        @times(3)
        @times(2)
        def plain(x):
            "What it does."
            return x
        def sample(index): return [plain(index), plain.__name__, plain.__doc__, plain.__wrapped__(1), plain.count()]
    """,
    "two closures over one variable": """
        def make():
            count = 0
            def up():
                nonlocal count
                count += 1
            def get(): return count
            def reset():
                nonlocal count
                count = 0
            return up, get, reset
        up, get, reset = make()
        def sample(index):
            reset(); up(); up()
            return get()
    """,
    "functools": """
        import functools
        @functools.lru_cache(maxsize=8)
        def cached(x): return x + 1
        @functools.cache
        def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
        add = functools.partial(lambda x, y: x + y, y=2)
        @functools.singledispatch
        def kind(x): return "other"
        @kind.register
        def _(x: int): return "int"
        @kind.register(list)
        def _(x): return "list"
        class Thing:
            @functools.cached_property
            def slow(self): return 5
            @functools.singledispatchmethod
            def kind(self, x): return "other"
            @kind.register
            def _(self, x: str): return "str"
            @functools.lru_cache
            def method(self): return 8
            half = functools.partialmethod(lambda self, x: x / 2, 3)
        @functools.total_ordering
        class Ordered:
            def __init__(self, x): self.x = x
            def __lt__(self, other): return self.x < other.x
            def __eq__(self, other): return self.x == other.x
        def sample(index):
            thing = Thing()
            return [cached(index), cached.cache_info().maxsize, fib(10), add(index), kind(1), kind([]), kind(""),
                    thing.slow, thing.kind("a"), thing.kind(1), thing.method(), thing.half(), Ordered(1) >= Ordered(0)]
    """,
    "properties, class methods, static methods": """
        class Base:
            scale = 2
            def __init__(self, x): self._x = x
            @property
            def x(self): return self._x
            @x.setter
            def x(self, value): self._x = value
            @classmethod
            def make(cls, x): return cls(x * cls.scale)
            @staticmethod
            def helper(x): return x + 1
            def __class_getitem__(cls, item): return f"{cls.__name__}[{item}]"
        class Derived(Base):
            scale = 3
            @classmethod
            def make(cls, x): return super().make(x)
        def sample(index):
            made = Derived.make(index)
            made.x += 1
            return [made.x, Derived.helper(1), Derived[3], type(made) is Derived]
    """,
    "lambdas and their defaults": """
        offsets = [lambda x, n=n: x + n for n in range(3)]
        key = lambda x, *, scale=2, table={"a": 1}: x * scale + table["a"]
        def sample(index): return [f(index) for f in offsets] + [key(index)]
    """,
    "__slots__": """
        class Slotted:
            __slots__ = ("x", "__private", "__weakref__")
            def __init__(self, x): self.x, self.__private = x, 2
            def total(self): return self.x + self.__private
        class More(Slotted):
            __slots__ = {"y": "its documentation"}
        KEPT = Slotted(5)
        def sample(index):
            more = More(index); more.y = 4
            try: more.z = 1
            except AttributeError: return [more.total() + more.y, KEPT.total()]
    """,
    "super() without arguments, multiple inheritance, mixins": """
        class Base:
            def __init__(self, x=1): self.x = x
            def get(self): return [self.x]
        class Left(Base):
            def get(self): return ["left", *super().get()]
        class Right(Base):
            def get(self): return ["right", *super().get()]
        class Mixin:
            def get(self): return ["mixin", *super().get()]
        class Both(Mixin, Left, Right):
            def __init__(self, x): super().__init__(x)
            def itself(self): return __class__ is Both
        def sample(index): return Both(index).get() + [Both(1).itself()]
    """,
    "a chain of three hundred functions": """
        exec("\\n".join(f"def f{n}(x): return f{n + 1}(x)" for n in range(300)) + "\\ndef f300(x): return x")
        def sample(index): return f0(index)
    """,
    "nested classes, classes inside functions": """
        CONSTANT = 9
        class Outer:
            class Inner:
                class Deep:
                    def get(self): return Outer.Inner.name
                name = "inner"
        def make(x):
            class Local:
                constant = CONSTANT
                def get(self): return (x, Local.__name__, self.constant)
            return Local
        Made = make(4)
        def sample(index): return [Outer.Inner.Deep().get(), Made().get(), Made.__qualname__]
        OPTIONS["collate_fn"] = lambda samples: [Made, *samples]
        def check(batch): assert batch[0] is Made
    """,
    "descriptors with __set_name__": """
        class Field:
            def __init__(self, default): self.default = default
            def __set_name__(self, owner, name):
                assert not hasattr(self, "name"), "named twice"
                self.name, self.owner = name, owner
            def __get__(self, instance, owner=None):
                return self if instance is None else instance.__dict__.get(self.name, self.default)
            def __set__(self, instance, value): instance.__dict__[self.name] = value * 2
        class Model:
            a = Field(1)
            b = Field(2)
        def sample(index):
            model = Model(); model.a = index
            return [model.a, model.b, Model.a.owner is Model]
    """,
    # Globals ----------------------------------------------------------------------------------------------------------
    "a global that refers to the dataset class": """
        class Dataset:
            def __len__(self): return 6
            def __getitem__(self, index): return [KINDS["mine"] is type(self), MAIN is Dataset, Dataset.__name__]
        KINDS = {"mine": Dataset}
        MAIN = Dataset
    """,
    "a global instance of a class of the script": """
        class Vocabulary:
            def __init__(self, words): self.words = words
            def __setstate__(self, state):
                self.__dict__.update(state)
                self.index = build_index(self.words)
            def __getitem__(self, word): return self.index[word]
            index = {}
        def build_index(words): return {word: n for n, word in enumerate(words)}
        VOCABULARY = Vocabulary(["a", "b"])
        VOCABULARY.index = build_index("ab")
        class Special(Vocabulary): pass
        NESTED = {"deep": [Special(["b", "a"])]}
        NESTED["deep"][0].index = build_index("ba")
        def sample(index): return [VOCABULARY["b"], NESTED["deep"][0]["b"]]
    """,
    "globals()[name]": """
        import xml.sax.saxutils
        import sqlite3
        connection = sqlite3.connect(":memory:")
        def transform_a(x): return x + 1
        class transform_b:
            def __new__(cls, x): return xml.sax.saxutils.escape(f"<{x}>")
        LIMIT = 5
        def sample(index):
            name = "transform_" + "ab"[index % 2]
            return [globals()[name](index), "LIMIT" in globals(), eval("LIMIT + 1")]
    """,
    "getattr(sys.modules[__name__], name)": """
        def transform(x): return x + 1
        class Point: pass
        def sample(index): return [getattr(sys.modules[__name__], "trans" + "form")(index), __name__, Point.__module__]
    """,
    "globals changed by the constructor": """
        import numpy as np
        STATE, COUNT, ARRAY = [], 0, np.zeros(3)
        class Dataset:
            def __init__(self):
                global COUNT, LATER
                STATE.append(1); ARRAY[0] += 1
                COUNT += 1
                LATER = len(STATE)
            def __len__(self): return 6
            def __getitem__(self, index): return [len(STATE), COUNT, LATER, helper(), ARRAY]
        def helper(): return COUNT + LATER
    """,
    "a constructor that leaves a file open changes globals": """
        import numpy as np
        STATE, ARRAY = [], np.zeros(3)
        class Dataset:
            def __init__(self):
                self.file = open(os.devnull)
                STATE.append(1); ARRAY[0] += 1
            def __len__(self): return 6
            def __getitem__(self, index): return [len(STATE), ARRAY]
    """,
    "locks": """
        import threading, queue
        LOCKS = [threading.Lock(), threading.RLock(), threading.Condition(), threading.Semaphore(2),
                 threading.BoundedSemaphore(2), threading.Condition(threading.Lock())]
        for lock in LOCKS[1:3]: lock.acquire()  # held by this thread, which may take them again
        READY = threading.Event(); READY.set()
        QUEUE = queue.Queue(); QUEUE.put(7)
        SIMPLE = queue.SimpleQueue()
        guard = threading.Lock()
        class Guarded:
            lock = threading.RLock()
            def __init__(self): self.own = threading.Lock()
        GUARDED = Guarded()
        def sample(index):
            QUEUE.put(QUEUE.get()); SIMPLE.put(1); SIMPLE.get()
            for lock in LOCKS:
                with lock: pass
            with guard, Guarded.lock, GUARDED.own: return [READY.is_set(), QUEUE.qsize(), LOCKS[5]._lock is not guard]
    """,
    "a logging.Handler and a logger": """
        import logging
        class Keep(logging.Handler):
            def __init__(self):
                super().__init__()
                self.kept = []
            def emit(self, record): self.kept.append(record.getMessage())
        keep = Keep()
        keep.acquire()
        logger = logging.getLogger("mine")
        stream = logging.StreamHandler()
        def sample(index):
            keep.handle(logging.makeLogRecord({"msg": str(index)}))
            logger.debug("not shown")
            return [keep.kept[-1], stream.level, logger.name]
    """,
    "threading.local and ContextVar": """
        import threading, contextvars
        local = threading.local()
        local.x = 3
        class Mine(threading.local):
            def __init__(self): self.y = 4
        mine = Mine()
        var = contextvars.ContextVar("var", default=5)
        other = contextvars.ContextVar("other")
        other.set(6)
        def sample(index): return [local.x, mine.y, var.get(), other.get()]
    """,
    "weak references": """
        import weakref
        class Thing:
            def __init__(self, x): self.x = x
        thing, extra = Thing(1), Thing(2)
        ref = weakref.ref(thing)
        by_key, by_value, members = weakref.WeakKeyDictionary(), weakref.WeakValueDictionary(), weakref.WeakSet()
        by_key[thing] = "key"; by_value["a"] = thing; members.add(thing)
        dead = weakref.ref(Thing(3))
        def sample(index):
            return [ref() is thing, by_key[thing], by_value["a"] is thing, thing in members, dead() is None]
    """,
    "a subclass of a library's folder of files": """
        import tests.support.folders as library
        class Mine(library.FolderDataset):
            def __getitem__(self, index):
                name, number = super().__getitem__(index)
                return {"name": name, "number": number, "classes": len(self.classes)}
        OPTIONS["dataset_kwargs"] = {"count": 6}
        Dataset = Mine
    """,
    "a __getitem__ inherited from a base in the script": """
        class Base:
            def __init__(self, n): self.n = n
            def __len__(self): return self.n
            def __getitem__(self, index): return self.load(index)
        class Middle(Base): pass
        class Mine(Middle):
            def load(self, index): return index * 3
        OPTIONS["dataset"] = Mine(6)
    """,
    "a global instance of the dataset, used by the collate function": """
        import numpy as np
        class Data:
            def __init__(self): self.vocabulary, self.array = ["a", "b"], np.arange(6)
            def __len__(self): return 6
            def __getitem__(self, index):
                self.vocabulary[0] = "changed"
                return self.array[index]
        data = Data()
        OPTIONS["dataset"] = data
        def collate(samples): return [data.vocabulary[0], np.stack(samples), np.shares_memory(data.array, samples[0])]
        OPTIONS["collate_fn"] = collate
    """,
    "__file__ and __name__": """
        from pathlib import Path
        HERE = Path(__file__).parent
        if __name__ == "__main__":
            FLAG = True
        def sample(index): return [Path(__file__).name, __name__, FLAG, (HERE / "script.py").exists()]
    """,
    "what can't be sent and isn't used": """
        import sqlite3
        FILE = open(os.devnull)
        CONNECTION = sqlite3.connect(":memory:")
        GENERATOR = (n for n in range(3))
        FRAME = sys._getframe()
        def train(): return CONNECTION, FILE, GENERATOR
        class Unrelated:
            file = FILE
        class Point: pass
        def sample(index): return [index, Point.__name__]
    """,
    "pickle inside a worker": """
        import copy, pickle
        class Point:
            def __init__(self, x): self.x = x
        def sample(index):
            loaded = pickle.loads(pickle.dumps(copy.deepcopy(Point(index))))
            return [loaded.x, type(loaded) is Point]
    """,
    "exceptions of the script": """
        class Odd(ValueError):
            def __init__(self, index):
                super().__init__(f"odd {index}")
                self.index = index
            def __reduce__(self): return Odd, (self.index,)
        def sample(index):
            try:
                if index % 2: raise Odd(index)
            except Odd as error: return error.index
            return -1
    """,
    "classes made by calls, and monkey patches": """
        Made = type("Made", (list,), {"double": lambda self: self * 2})
        class Plain:
            def get(self): return 1
        def better(self): return 2
        Plain.get = better
        Plain.extra = staticmethod(lambda: 3)
        class Callable:
            def __call__(self, x): return x + self.base
        call = Callable(); call.base = 1
        bound = call.__call__
        def sample(index): return [Made([index]).double(), Plain().get(), Plain.extra(), bound(index)]
    """,
    # Combinations and rarer things ------------------------------------------------------------------------------------
    "Enums by calls, inside classes, of dataclasses and with tricks": """
        import enum
        from dataclasses import dataclass
        Called = enum.Enum("Called", "ONE TWO")
        class Outer:
            class Mode(enum.IntFlag):
                X = enum.auto()
                Y = enum.auto()
            default = Mode.X
        @enum.unique
        class Op(enum.Enum):
            ADD = "+"
            @property
            def run(self): return {"+": lambda a, b: a + b}[self.value]
            @classmethod
            def _missing_(cls, value): return cls.ADD
        @dataclass(frozen=True)
        class Size:
            w: int
            h: int
        class Named(Size, enum.Enum):
            SMALL = 1, 2
            LARGE = 3, 4
        TABLE = {Called.ONE: "one", Op.ADD: "add", Outer.Mode.X | Outer.Mode.Y: "both"}
        def sample(index):
            return [TABLE[Called["ONE"]], Op("?").run(index, 1), TABLE[Outer.Mode(3)], Outer.default.name,
                    Named.LARGE.w, Named.SMALL is Named["SMALL"], [mode.name for mode in Outer.Mode]]
    """,
    "generic dataclasses, protocols and named tuples": """
        from dataclasses import dataclass
        from typing import Generic, NamedTuple, Protocol, TypeVar, overload, get_args, get_origin
        T = TypeVar("T"); U = TypeVar("U", int, str)
        @dataclass
        class Pair(Generic[T, U]):
            left: T
            right: U
        class Source(Protocol[T]):
            def get(self) -> T: ...
        class Numbers(Source[int]):
            def get(self) -> int: return 4
        IntPair = Pair[int, str]
        def sample(index): return [IntPair(index, "a").left, Numbers().get(), get_args(IntPair)[0] is int,
                                   get_origin(IntPair) is Pair, Pair.__parameters__ == (T, U)]
    """,
    "metaclasses with ways of their own": """
        class Odd(type):
            def __prepare__(name, bases, **options): return {"prepared": True}
            def __new__(mcs, name, bases, namespace, tag=None):
                cls = super().__new__(mcs, name, bases, namespace)
                cls.tag = tag
                return cls
            def __init__(cls, name, bases, namespace, tag=None): super().__init__(name, bases, namespace)
            def __eq__(cls, other): raise RuntimeError("not to be compared")
            __hash__ = None
            def __len__(cls): return 0
            def __iter__(cls): return iter([1])
            def __getattr__(cls, name):
                if name.startswith("__"): raise AttributeError(name)
                return f"no {name}"
            def __setattr__(cls, name, value):
                if name != "tag": raise RuntimeError("not to be set")
                super().__setattr__(name, value)
            def __instancecheck__(cls, instance): return instance == "odd"
        class Thing(metaclass=Odd, tag="t"):
            def get(self): return self.tag
        class Single(type):
            instances = {}
            def __call__(cls, *args):
                if cls not in cls.instances: cls.instances[cls] = super().__call__(*args)
                return cls.instances[cls]
        class Config(metaclass=Single):
            def __init__(self): self.x = 1
        config = Config()
        def sample(index): return [Thing().get(), isinstance("odd", Thing), Thing.nothing, Config() is config]
    """,
    "containers of the library with code of the script": """
        import collections, functools, itertools, operator, types
        COUNTS = collections.defaultdict(lambda: 7, a=1)
        class Ordered(collections.OrderedDict):
            def first(self): return next(iter(self))
        class Users(collections.UserDict):
            def __missing__(self, key): return key * 2
        ORDERED, USERS, QUEUE = Ordered(b=1, a=2), Users(), collections.deque([1, 2], maxlen=2)
        CHAIN = collections.ChainMap({"x": 1}, COUNTS)
        SPACE = types.SimpleNamespace(scale=3, function=lambda x: x + 1)
        PROXY = types.MappingProxyType({"a": len})
        COUNTER = collections.Counter("aab")
        class Words(list):
            def join(self): return "-".join(self)
        class Text(str):
            extra = 5
        WORDS, TEXT = Words("ab"), Text("t"); TEXT.own = 6
        method, part = WORDS.join, functools.partial(Words.join, WORDS)
        def sample(index):
            return [COUNTS["new"], ORDERED.first(), USERS[4], QUEUE[1], CHAIN["x"], SPACE.function(SPACE.scale),
                    PROXY["a"]("abc"), COUNTER["a"], method(), part(), TEXT.own + TEXT.extra]
    """,
    "attributes of functions, and state in defaults": """
        def count(x, cache={}):
            count.calls = getattr(count, "calls", 0)
            cache[x] = cache.get(x, 0)
            return len(cache) > 0
        count.label = "a label"
        def outer():
            def inner(): return inner.mark
            inner.mark = 5
            return inner
        inner = outer()
        def sample(index): return [count(index), count.label, inner(), inner.__qualname__]
    """,
    "Subset, ConcatDataset and random_split of a subclass": """
        import torch
        from torch.utils.data import ConcatDataset, Subset, TensorDataset, random_split
        class Mine(TensorDataset):
            scale = 2
            def __getitem__(self, index): return super().__getitem__(index)[0] * self.scale
        class Both(ConcatDataset):
            def __getitem__(self, index): return index, super().__getitem__(index)
        data = Mine(torch.arange(10))
        left, right = random_split(data, [4, 6], torch.Generator().manual_seed(1))
        OPTIONS["dataset"] = Both([Subset(left, [0, 1]), right])
    """,
    "torch modules with buffers, hooks and parameters": """
        import torch
        class Normalize(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("mean", torch.tensor([1.0, 2.0]))
                self.scale = torch.nn.Parameter(torch.tensor(2.0), requires_grad=False)
                self.hook = self.register_forward_hook(lambda module, args, output: output + 1)
            def forward(self, x): return (x - self.mean) * self.scale
        class Square(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x): return x * x
        pipeline = torch.nn.Sequential(Normalize(), torch.nn.Identity())
        def sample(index): return Square.apply(pipeline(torch.tensor([float(index), 1.0])))
    """,
    "a thread pool that nobody has used yet": """
        import concurrent.futures
        pool = concurrent.futures.ThreadPoolExecutor(2)
        def sample(index): return pool.submit(lambda: index + 1).result(timeout=10)
    """,
    "classes with __reduce__, __getstate__ and __getnewargs__": """
        class Reduced:
            def __init__(self, x): self.x = x
            def __reduce__(self): return make, (self.x + 1,)
        def make(x): return Reduced(x)
        class Stated:
            __slots__ = ("a", "b")
            def __init__(self): self.a, self.b = 1, 2
            def __getstate__(self): return (self.a, self.b)
            def __setstate__(self, state): self.a, self.b = state[0] + STEP, state[1]
        class New(tuple):
            def __new__(cls, x, y): return super().__new__(cls, (x, y))
            def __getnewargs__(self): return tuple(self)
        STEP = 0
        reduced, stated, new = Reduced(1), Stated(), New(1, 2)
        reduced.x = 1
        OPTIONS["collate_fn"] = list
        def sample(index): return [reduced.x > 0, stated.a, new[1], type(new).__name__]
    """,
    "singletons, interning tables and keys that look at their class": """
        class Config:
            instance = None
            def __new__(cls):
                if cls.instance is None: cls.instance = super().__new__(cls)
                return cls.instance
        Config().size = 3
        class Symbol:
            table = {}
            def __new__(cls, name):
                if name not in cls.table:
                    cls.table[name] = super().__new__(cls)
                    cls.table[name].name = name
                return cls.table[name]
            def __reduce__(self): return Symbol, (self.name,)
            def __repr__(self): return self.name
        A, B = Symbol("a"), Symbol("b")
        OPTIONS["collate_fn"] = list
        def sample(index): return [Config().size, Symbol("a") is A, len(Symbol.table), B]
        def check(batch): assert all(row[3] is B for row in batch)
    """,
    "modules made by hand and C structures": """
        import ctypes, struct, types
        plugin = sys.modules["a_plugin"] = types.ModuleType("a_plugin")
        exec("class Point:\\n    scale = 2\\ndef get(x): return Point.scale * x", vars(plugin))
        class Header(ctypes.Structure):
            _fields_ = [("a", ctypes.c_int), ("b", ctypes.c_double)]
        PACKER = struct.Struct("<i")
        OPTIONS["collate_fn"] = list
        def sample(index): return [plugin.get(index), plugin.Point, Header(index).a, PACKER.pack(index)]
        def check(batch): assert all(row[1] is plugin.Point for row in batch)
    """,
    "__main__ by other names": """
        import __main__, importlib
        LIMIT = 3
        class Point: pass
        def sample(index):
            main = importlib.import_module("__main__")
            return [__main__.LIMIT, main.Point is Point, sys.modules["__main__"].LIMIT, vars(main)["LIMIT"]]
    """,
    "types of C code, operators and NumPy's functions": """
        import types, operator, re, numpy as np, datetime, zoneinfo, uuid, fractions, random
        FUNCTION, METHOD, KEYS, GENERATOR = types.FunctionType, types.MethodType, dict, types.GeneratorType
        VECTOR = np.vectorize(lambda x: x + 1)
        RECORD = np.dtype([("a", "i4"), ("b", "f8", (2,))])
        RANDOM, STATE = random.Random(1), np.random.RandomState(1)
        ZONE, UNIQUE, HALF = datetime.timezone.utc, uuid.UUID(int=3), fractions.Fraction(1, 2)
        ADD = {"+": operator.add, "u": np.add.reduce, "m": str.upper, "j": "-".join}
        def sample(index):
            return [isinstance(sample, FUNCTION), VECTOR(np.arange(2)), np.zeros(1, RECORD)["b"].shape[1],
                    RANDOM.random() >= 0, STATE.rand() >= 0, str(UNIQUE), str(HALF), ADD["+"](index, 1),
                    ADD["m"]("a"), ADD["j"]("ab"), isinstance({}, KEYS)]
    """,
    "a state with a function that is made for it": """
        LIMIT = 4
        class Bounded:
            def __init__(self): self.limit = lambda x: min(x, LIMIT)
            def __getstate__(self): return {"limit": lambda x: min(x, LIMIT)}
        bounded = Bounded()
        def sample(index): return bounded.limit(index)
    """,
    "classes in all detail: order, hooks, aliases, weights, slots and hints": """
        from __future__ import annotations
        import enum, typing
        from dataclasses import dataclass
        class Steps:
            def to_float(x): return x * 1.0
            def scale(x): return x / 2
            def add(x): return x + 1
        REGISTRY = []
        class Plugin:
            def __init_subclass__(cls, *, scale): REGISTRY.append((cls.__name__, scale))
        class One(Plugin, scale=4): pass
        class Mode(enum.Flag):
            R = 4
            W = 2
            RW = 6
        class Colour(enum.Enum):
            RED = 1
            ROUGE = 1
        class Weighted(enum.Enum):
            def __new__(cls, value, weight=1.0):
                member = object.__new__(cls)
                member._value_, member.weight = value, weight
                return member
        class Level(Weighted):
            LOW = "low"
            HIGH = "high", 5.0
        @dataclass(slots=True)
        class Slotted:
            x: int
        class Opt: pass
        class Cfg:
            opt: Opt
        OPTIONS["collate_fn"] = list
        def sample(index):
            steps, slotted = [name for name in vars(Steps) if name[0] != "_"], Slotted(index)
            try: slotted.y = 1
            except AttributeError: steps.append("refused")
            hints = sorted(typing.get_type_hints(Cfg))
            return [steps, REGISTRY, str(Mode(6)), list(Colour.__members__), Level.HIGH.weight, hints, slotted]
        def check(batch): assert all(type(row[-1]) is Slotted for row in batch)
    """,
}
