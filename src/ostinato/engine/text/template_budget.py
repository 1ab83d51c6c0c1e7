"""Work limits of chat templates: every iteration of a loop and every call of a macro is counted.

Templates come from strangers, and their work grows with the conversation: two nested loops are enough to stall a
server. Python cannot end a thread, so the template itself asks, at every step, whether it may continue.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import jinja2
import jinja2.nodes
import jinja2.sandbox
import jinja2.visitor

_STEPS_PER_LOOK = 256
"""Steps between two looks at the clock."""
MAX_CHARACTERS = 2**25
"""Longest text that a template may make by multiplying or adding. A prompt is far shorter."""


class TemplateBudgetExceeded(Exception):
    """Raised when a template has used up its budget."""


@dataclass(frozen=True, slots=True)
class TemplateBudget:
    """Work that one rendering may take."""

    steps: int = 5_000_000
    seconds: float = 10.0


DEFAULT_TEMPLATE_BUDGET = TemplateBudget()


class TemplateMeter(threading.local):
    """Counter of the steps of the rendering that runs in this thread."""

    left = DEFAULT_TEMPLATE_BUDGET.steps
    until = float("inf")

    @contextmanager
    def limited(self, budget: TemplateBudget) -> Iterator[None]:
        """Limit the work of renderings within. BudgetSpent if they take more."""
        before = self.left, self.until
        self.left, self.until = budget.steps, time.monotonic() + budget.seconds
        try:
            yield
        finally:
            self.left, self.until = before

    def step(self) -> str:
        """Count one step, and return an empty string, so that the template prints nothing."""
        self.left -= 1
        if self.left < 0 or (self.left % _STEPS_PER_LOOK == 0 and time.monotonic() > self.until):
            raise TemplateBudgetExceeded
        return ""


class _Limiter(jinja2.visitor.NodeTransformer):
    """Rewrites joins of texts as calls of the environment, since no operator that a sandbox intercepts covers them."""

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        concat = jinja2.nodes.EnvironmentAttribute("join_texts")
        return jinja2.nodes.Call(concat, node.nodes, [], None, None).set_lineno(node.lineno)


class MeteredEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Sandbox whose templates count their steps, and make no text beyond `MAX_CHARACTERS`."""

    meter = TemplateMeter()
    intercepted_binops = frozenset({"*", "+", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        template = _Limiter().visit(super()._parse(source, name, filename))
        for node in template.find_all((jinja2.nodes.For, jinja2.nodes.Macro, jinja2.nodes.CallBlock)):
            step = jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute("step"), [], [], None, None)
            node.body.insert(0, jinja2.nodes.ExprStmt(step).set_lineno(node.lineno))
        return template.set_environment(self)

    def step(self) -> str:
        return self.meter.step()

    def join_texts(self, *parts: object) -> str:
        """Join all parts as text."""
        texts = [str(part) for part in parts]
        _check(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: object, right: object) -> object:
        if operator == "*":
            _check(_length(left) * right if isinstance(right, int) else _length(right) * left)  # type: ignore[operator]
        elif operator == "+":
            _check(_length(left) + _length(right))
        elif isinstance(left, int) and isinstance(right, int):
            _check(abs(right) * left.bit_length())
        return super().call_binop(context, operator, left, right)


def _length(value: object) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _check(size: object) -> None:
    if isinstance(size, int) and size > MAX_CHARACTERS:
        raise TemplateBudgetExceeded
