"""Sandbox of chat templates, in which everything that a template does is counted before it is done.

Templates come from strangers, and their work grows with the conversation: two nested loops are enough to stall a
server. Python can end neither a thread nor a call into C, so the template itself asks whether it may continue. Each
iteration, call, filter, comparison and printed value is a step, and so are `_CHARACTERS_PER_STEP` characters that it
reads or makes.

The tables below hold the filters, tests and methods whose cost follows from their arguments. Any other one, such as
`center` or `%` of a text, is *uncounted*: it runs only if the budget allows that, as in a process that can be ended.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from contextlib import contextmanager
from dataclasses import dataclass
from types import GeneratorType
from typing import Any, cast

import jinja2
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor

_STEPS_PER_LOOK = 256
"""Steps between two looks at the clock."""
_CHARACTERS_PER_STEP = 256
_ITEM = 64
"""Characters that an item of a list or object counts as."""
MAX_TEMPLATE_CHARACTERS = 2**25
"""Longest text that a template may make by multiplying or adding. A prompt is far shorter."""
_MAX_BITS = 2**16
"""Largest integer that a template may calculate with, in bits."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SHALLOW_FILTERS = _names("attr count d default first items last length map reject rejectattr select selectattr")
"""Filters that look at no item's content."""
_DEEP_FILTERS = _names(
    "abs capitalize dictsort e escape float forceescape indent int join list lower max min replace reverse safe sort "
    "string title tojson trim unique upper"
)
_DEEP_TESTS = _names("!= < <= == > >= eq equalto ge greaterthan gt in le lessthan lower lt ne sameas upper")
_NUMBER_TESTS = _names("divisibleby even odd")
_METHODS: dict[type, frozenset[str]] = {
    str: _names(
        "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier islower "
        "isnumeric isprintable isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace "
        "rfind rindex rpartition rsplit rstrip split splitlines startswith strip swapcase title upper"
    ),
    dict: _names("copy get items keys values"),
    list: _names("copy count index"),
    tuple: _names("count index"),
}


class TemplateBudgetExceeded(Exception):
    """Raised when a template has used up its budget."""


@dataclass(frozen=True, slots=True)
class TemplateBudget:
    """Work that one rendering may take. The seconds are the processor's."""

    steps: int = 5_000_000
    seconds: float = 10.0
    uncounted: bool = True
    """True if the template may do what is not counted, which takes any time and memory."""


DEFAULT_TEMPLATE_BUDGET = TemplateBudget()
PROBE_BUDGET = TemplateBudget(steps=20_000, seconds=0.3, uncounted=False)
"""Budget for a short conversation, in a process that serves others too."""


class TemplateMeter(threading.local):
    """Counter of the steps of the rendering that runs in this thread."""

    left = DEFAULT_TEMPLATE_BUDGET.steps
    until = float("inf")
    uncounted = True
    _next_look = 0

    @contextmanager
    def limited(self, budget: TemplateBudget) -> Iterator[None]:
        """Limit the work of renderings within. TemplateBudgetExceeded if they take more."""
        before = self.left, self.until, self.uncounted
        self.left, self.until, self.uncounted = budget.steps, time.thread_time() + budget.seconds, budget.uncounted
        self._next_look = self.left - _STEPS_PER_LOOK
        try:
            yield
        finally:
            self.left, self.until, self.uncounted = before

    def charge(self, characters: int = 0) -> None:
        """Count one step, and those of some characters."""
        self.left -= 1 + characters // _CHARACTERS_PER_STEP
        if self.left < self._next_look:
            self._next_look = self.left - _STEPS_PER_LOOK
            if self.left < 0 or time.thread_time() > self.until:
                raise TemplateBudgetExceeded

    def charge_deep(self, *values: object) -> None:
        """Count one step, and those of all characters and items in `values`, however deep."""
        self.charge(weight(values, max(0, self.left) * _CHARACTERS_PER_STEP))

    def charge_uncounted(self) -> None:
        """Raise TemplateBudgetExceeded unless the budget allows what is not counted."""
        if not self.uncounted:
            raise TemplateBudgetExceeded
        self.charge()


_ATOMS = (int, float, type(None))
_CONTAINERS = (dict, list, tuple, range, KeysView, ItemsView, ValuesView)


def weight(values: Iterable[object], most: int) -> int:
    """Return the characters in all values, however deep; items count too. TemplateBudgetExceeded beyond `most`."""
    total, todo = 0, list(values)
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            total += len(item)
            continue
        total += _ITEM
        if isinstance(item, _ATOMS):
            continue
        if isinstance(item, jinja2.utils.Namespace):
            item = item._Namespace__attrs
        if isinstance(item, _CONTAINERS):
            total += _ITEM * len(item)
            if total > most:  # a small list may hold itself many times over
                raise TemplateBudgetExceeded
            if not isinstance(item, range):
                todo += item
            if isinstance(item, dict):
                todo += item.values()
    return total


class _Limiter(jinja2.visitor.NodeTransformer):
    """Rewriter of what no hook of a sandbox intercepts: joins of texts, comparisons, slices, keys."""

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _through(" join", jinja2.nodes.List(node.nodes), node.lineno)

    def visit_Compare(self, node: jinja2.nodes.Compare) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.expr = _deep(node.expr)
        for operand in node.ops:
            operand.expr = _deep(operand.expr)
        return node

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, jinja2.nodes.Slice):
            node.node = _through(" size", node.node, node.lineno)
        else:
            node.arg = _deep(node.arg)
        return node

    def visit_Pair(self, node: jinja2.nodes.Pair) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.key = _deep(node.key)
        return node


def _through(name: str, node: jinja2.nodes.Expr, lineno: int) -> jinja2.nodes.Filter:
    through = jinja2.nodes.Filter(node, name, [], [], None, None)
    through.set_lineno(lineno)
    return through


def _deep(node: jinja2.nodes.Expr) -> jinja2.nodes.Expr:
    """Return an expression whose value is counted, unless it is written in the template."""
    items = node.items if isinstance(node, jinja2.nodes.List | jinja2.nodes.Tuple) else [node]
    is_written = all(isinstance(item, jinja2.nodes.Const) for item in items)
    return node if is_written else _through(" deep", node, node.lineno)


class MeteredEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Sandbox whose templates count their steps, and make no text beyond `MAX_TEMPLATE_CHARACTERS`."""

    meter = TemplateMeter()
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, **settings: Any) -> None:
        super().__init__(finalize=self._count_deep, **settings)

    def count_all(self) -> None:
        """Count all filters and tests that the environment has now."""
        self.filters = {name: self._counted_filter(name, filter) for name, filter in self.filters.items()}
        self.filters |= {
            " step": self._step,
            " deep": self._count_deep,
            " size": self._count_size,
            " join": self._join_texts,
        }
        for name in _DEEP_TESTS | _NUMBER_TESTS:
            self.tests[name] = self._counted_test(cast(Any, self.tests[name]), name in _NUMBER_TESTS)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        template = _Limiter().visit(super()._parse(source, name, filename))
        for node in template.find_all((jinja2.nodes.For, jinja2.nodes.Macro, jinja2.nodes.CallBlock)):
            step = _through(" step", jinja2.nodes.Const(""), node.lineno)
            node.body.insert(0, jinja2.nodes.ExprStmt(step).set_lineno(node.lineno))
            if isinstance(node, jinja2.nodes.For) and node.test is not None:
                node.test = jinja2.nodes.And(jinja2.nodes.Not(step), node.test).set_lineno(node.lineno)
        parsed: jinja2.nodes.Template = template.set_environment(self)
        return parsed

    @staticmethod
    @jinja2.pass_context  # so that it is not called when the template is compiled
    def _step(context: jinja2.runtime.Context, value: str) -> str:  # noqa: ARG004
        MeteredEnvironment.meter.charge()
        return value

    def _count_deep(self, value: object) -> object:
        if isinstance(value, str):
            self.meter.charge(len(value))
        else:
            self.meter.charge_deep(value)
        return value

    def _count_size(self, value: object) -> object:
        self.meter.charge(_weight(value))
        return value

    def _join_texts(self, parts: list[object]) -> str:
        self.meter.charge_deep(parts)
        texts = [str(part) for part in parts]
        _check(sum(map(len, texts)))
        return "".join(texts)

    def _counted_filter(self, name: str, function: Callable[..., object]) -> Callable[..., object]:
        passed = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

        @jinja2.pass_context
        def call(context: jinja2.runtime.Context, value: Any, /, *args: Any, **more: Any) -> Any:
            if name in _SHALLOW_FILTERS:
                self.meter.charge_deep(*args, *more.values())
            elif name in _DEEP_FILTERS:
                value = list(value) if isinstance(value, Iterator) else value
                self.meter.charge_deep(value, *args, *more.values())
                if name in _GROWTH:
                    self._charge_growth(_GROWTH[name](value, *args, **more))
            else:
                self.meter.charge_uncounted()
            first = {"context": context, "eval_context": context.eval_ctx, "environment": self}
            return self._count_result(function(*([first[passed]] if passed else []), value, *args, **more))

        return call

    def _counted_test(self, function: Callable[..., object], of_numbers: bool) -> Callable[..., object]:
        @jinja2.pass_context  # so that it is not called when the template is compiled
        def call(context: jinja2.runtime.Context, *args: Any) -> Any:  # noqa: ARG001
            if of_numbers and not all(isinstance(each, int | float) for each in args):
                self.meter.charge_uncounted()  # of a text, `%` is a format
            self.meter.charge_deep(*args)
            return function(*args)

        return call

    def call(self, context: jinja2.runtime.Context, function: object, /, *args: object, **more: object) -> Any:
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if name in _METHODS.get(type(owner), ()):
            if name == "join":
                args = tuple(list(each) if isinstance(each, Iterator) else each for each in args)
            self.meter.charge(len(owner) if isinstance(owner, str) else 0)
            if args or more:
                self.meter.charge_deep(None if isinstance(owner, str | dict) else owner, *args, *more.values())
            if name in ("join", "replace"):
                self._charge_growth(_GROWTH[name](*((args[0], owner) if name == "join" else (owner, *args))))
        elif name == "format" and _inserts_texts(text := _formatted(function), args, more):
            self._charge_growth(len(text) + text.count("{") * sum(map(_weight, args)))
        elif isinstance(function, (*_RUNTIME, type)):
            self.meter.charge(_ITEM * (len(args) + len(more)))
        elif isinstance(owner, _RUNTIME) or any(
            function is known for name, known in self.globals.items() if name != "lipsum"
        ):
            self.meter.charge_deep(*args, *more.values())
        else:
            self.meter.charge_uncounted()
        return self._count_result(super().call(context, function, *args, **more))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int | float) and isinstance(right, int | float):
            self.meter.charge()
            bits = max(_bits(left), _bits(right))
            if operator == "**" and isinstance(right, int):
                bits *= abs(right) if _bits(left) > 1 else 1
            if bits > _MAX_BITS:
                raise TemplateBudgetExceeded
        elif operator == "+":
            self._charge_growth(_weight(left) + _weight(right))
        elif operator == "*":
            self._charge_growth(_weight(left) * right if isinstance(right, int) else _weight(right) * left)
        else:
            self.meter.charge_uncounted()
        return super().call_binop(context, operator, left, right)

    def _charge_growth(self, size: object) -> None:
        if isinstance(size, int):
            _check(size)
            self.meter.charge(max(size, 0))

    def _count_result(self, result: object) -> object:
        if isinstance(result, GeneratorType):
            return self._stepped(result)
        if isinstance(result, str | list):
            self.meter.charge(_weight(result))
        return result

    def _stepped(self, items: Iterator[object]) -> Iterator[object]:
        for item in items:
            self.meter.charge()
            yield item


_RUNTIME = (
    jinja2.runtime.Macro,
    jinja2.runtime.BlockReference,
    jinja2.runtime.LoopContext,
    jinja2.utils.Cycler,
    jinja2.utils.Joiner,
    jinja2.Undefined,  # whose call is an error
)


_PLAIN_FORMAT = re.compile(r"[^{}]*(\{\d?\}[^{}]*)*")


def _formatted(function: object) -> str:
    """Return the text whose method `format` jinja2 has wrapped, empty if it is something else."""
    text = getattr(getattr(function, "__wrapped__", None), "__self__", "")
    return text if isinstance(text, str) else ""


def _inserts_texts(text: str, args: tuple[Any, ...], more: dict[str, object]) -> bool:
    """Return whether `format` of a text only puts texts into it: a width could make it of any length."""
    return not more and all(isinstance(each, str) for each in args) and _PLAIN_FORMAT.fullmatch(text) is not None


def _bits(value: float) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _length(value: object) -> int:
    return len(value) if isinstance(value, str | list | tuple | dict | range) else 0


def _weight(value: object) -> int:
    return _length(value) * (1 if isinstance(value, str) else _ITEM)


def _check(size: int) -> None:
    if size > MAX_TEMPLATE_CHARACTERS:
        raise TemplateBudgetExceeded


def _of_json(value: Any, _: bool = False, indent: Any = None, separators: Any = (), *__: Any, **___: Any) -> int:
    """Return the characters between the values of a JSON text."""
    width = indent if isinstance(indent, int) else len(str(indent or ""))
    between = sum(len(str(each)) for each in separators or ())
    total, todo = 0, [(value, 1)]
    while todo:
        item, depth = todo.pop()
        total += width * depth + between
        items = item.values() if isinstance(item, dict) else item if isinstance(item, list | tuple) else ()
        todo += [(each, depth + 1) for each in items]
    return total * (4 if indent is not None else 1)  # with an indent, the encoder is Python's


_GROWTH: dict[str, Callable[..., int]] = {
    "replace": lambda text, old, new, *_, **__: str(text).count(str(old)) * len(str(new)),
    "join": lambda items, d="", *_, **__: _length(items) * len(str(d)),
    "indent": lambda text, width=4, *_, **__: (
        (str(text).count("\n") + 1) * (width if isinstance(width, int) else len(str(width)))
    ),
    "title": lambda text: 64 * _length(text),  # a regular expression splits it
    "tojson": _of_json,
}
"""Filter or method -> what it costs besides reading its arguments, in characters."""
