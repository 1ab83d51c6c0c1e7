"""`GET /openapi.json`, and `GET /docs`: the same as a page, which loads nothing from other servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

from fastapi.responses import HTMLResponse, Response
from jinja2 import Environment

from ostinato.json_io import JsonMapping
from ostinato.serve.api.page import HEADERS
from ostinato.serve.http.middleware import ApiRouter

PATH = "/docs"
DOCUMENT = "/openapi.json"
_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ info.title }} {{ info.version }}: the API</title>
<link rel="icon" href="page/icon.svg">
<link rel="stylesheet" href="page/styles/base.css">
<link rel="stylesheet" href="page/styles/docs.css">
</head>
<body>
<main>
<h1>{{ info.title }} {{ info.version }}: the API</h1>
<p>All that a program needs is in <a href="openapi.json">openapi.json</a>. An object with a field that is not listed is
refused, and the error names the field.</p>
<nav aria-label="Endpoints"><ul>
{% for endpoint in endpoints -%}
<li><a href="#{{ endpoint.anchor }}"><code>{{ endpoint.method }} {{ endpoint.path }}</code></a></li>
{% endfor -%}
</ul></nav>
{% for endpoint in endpoints -%}
<section id="{{ endpoint.anchor }}">
<h2><code>{{ endpoint.method }} {{ endpoint.path }}</code></h2>
{% if endpoint.text %}<p>{{ endpoint.text }}</p>{% endif %}
{% if endpoint.body %}<p>Body: <a href="#{{ endpoint.body }}">{{ endpoint.body }}</a></p>{% endif %}
</section>
{% endfor -%}
{% for name, schema in schemas -%}
<section id="{{ name }}">
<h2>{{ name }}</h2>
{% if schema.description %}<p>{{ schema.description }}</p>{% endif %}
<table>
<tr><th>field</th><th>type</th><th>meaning</th></tr>
{% for field in schema.fields -%}
<tr><td><code>{{ field.name }}</code>{% if field.is_required %} (required){% endif %}</td>
<td>{% for part, target in field.kinds %}{% if not loop.first %} or {% endif %}
{%- if target %}<a href="#{{ target }}">{{ part }}</a>{% else %}{{ part }}{% endif %}{% endfor %}</td>
<td>{{ field.text }}</td></tr>
{% endfor -%}
</table>
</section>
{% endfor -%}
</main>
</body>
</html>
"""


class _Endpoint(NamedTuple):
    method: str
    path: str
    text: str
    body: str | None
    """Name of the schema of its body."""

    @property
    def anchor(self) -> str:
        return f"{self.method}-{self.path}"


class _Field(NamedTuple):
    name: str
    kinds: list[tuple[str, str | None]]
    """Texts of the types that a value may have, each with the schema that it links to."""
    text: str
    is_required: bool


class _Schema(NamedTuple):
    description: str
    fields: list[_Field]


def openapi_routers(document: Callable[[], JsonMapping]) -> tuple[ApiRouter, ApiRouter]:
    """Return the routers of the page, and of the document itself, which `document` returns.

    Both are made at the first request for one of them, in a thread: that takes half a second, for which all clients of
    the event loop would wait.
    """
    public, router, lock = ApiRouter(is_public=True), ApiRouter(), asyncio.Lock()

    @cache
    def made() -> tuple[bytes, str]:
        content = document()
        return json.dumps(content, ensure_ascii=False).encode(), rendered_page(content)

    async def texts() -> tuple[bytes, str]:
        async with lock:
            return await asyncio.to_thread(made)

    @public.get(PATH, include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse((await texts())[1], headers=HEADERS)

    @router.get(DOCUMENT, include_in_schema=False)
    async def openapi() -> Response:
        return Response((await texts())[0], media_type="application/json")

    return public, router


def rendered_page(document: JsonMapping) -> str:
    """Return an OpenAPI document as HTML."""
    schemas = document["components"]["schemas"]
    named = [(name, _schema(schema)) for name, schema in schemas.items() if "properties" in schema]
    template = Environment(autoescape=True, trim_blocks=True).from_string(_PAGE)
    return template.render(info=document["info"], endpoints=list(_endpoints(document)), schemas=named)


def _endpoints(document: JsonMapping) -> Iterator[_Endpoint]:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            content = operation.get("requestBody", {}).get("content", {})
            body = _target(content.get("application/json", {}).get("schema", {}))
            yield _Endpoint(method.upper(), path, operation.get("description", ""), body)


def _schema(schema: JsonMapping) -> _Schema:
    required = schema.get("required", ())
    fields = [
        _Field(name, list(_kinds(field)), field.get("description", ""), name in required)
        for name, field in schema["properties"].items()
        if field.get("type") != "null"  # a field that is refused by name
    ]
    return _Schema(schema.get("description", ""), fields)


def _target(schema: JsonMapping) -> str | None:
    """Return the name of the schema that another one is a reference to."""
    reference = schema.get("$ref")
    return None if reference is None else str(reference).rpartition("/")[2]


def _kinds(schema: JsonMapping) -> Iterator[tuple[str, str | None]]:
    """Yield the types that a value of a schema may have, without null."""
    for part in schema.get("anyOf") or schema.get("oneOf") or (schema,):
        target = _target(part)
        if target is not None:
            yield target, target
        elif "enum" in part or "const" in part:
            yield ", ".join(map(repr, part.get("enum") or [part["const"]])), None
        elif part.get("type") == "array":
            for text, inner in _kinds(part.get("items", {})):
                yield f"list of {text}", inner
        elif part.get("anyOf") or part.get("oneOf"):
            yield from _kinds(part)
        elif part.get("type") != "null":
            yield str(part.get("type", "any")), None
