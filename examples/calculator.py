"""Let the model call a function of this file, and print each call, its result and the answer.

`ostinato chat --tools examples/calculator.py` takes the same function. Its name, docstring and signature are what a
model is told. Those that begin with an underscore are no tools.

Run it:    .venv/bin/python examples/calculator.py

It prints:

    calculate {"expression": "17 + 25"} -> 42
    calculate {"expression": "42 - 9"} -> 33
    #### 33
"""

import ast
import operator

from ostinato import LLM, ToolChat

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculate(expression: str) -> float:
    """Return the value of an arithmetic expression, such as 17 + 25."""
    return _value(ast.parse(expression, mode="eval").body)


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.BinOp(left, operation, right) if type(operation) in _OPERATORS:
            return _OPERATORS[type(operation)](_value(left), _value(right))
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand)
    raise ValueError("an expression has numbers, + - * / and brackets")


if __name__ == "__main__":
    question = "Ava has 17 apples and buys 25 more. She gives away 9. How many apples are left?"
    with LLM("demo", max_num_seqs=4) as llm:
        for piece in ToolChat(llm, [calculate]).answer([{"role": "user", "content": question}]):
            if isinstance(piece, str):
                print(piece, end="")
            else:
                print(piece.name, piece.arguments, "->", piece.result)
    print()
