"""Routers of endpoints, with what holds for all endpoints of one: their dialect, and whether they need a key."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import APIRouter

from ostinato.serve.http.api_errors import Dialect


class ApiRouter(APIRouter):
    """Router of endpoints that speak one dialect, and are all public or all behind a key.

    A dialect other than OpenAI's needs a `prefix`: paths below it that are not served get their error in that dialect.
    """

    def __init__(self, prefix: str = "", *, dialect: Dialect = "openai", is_public: bool = False) -> None:
        assert prefix or dialect == "openai", "a dialect is known by the prefix"
        super().__init__(prefix=prefix)
        self.dialect: Dialect = dialect
        self.is_public = is_public


class PathRules:
    """Dialect and publicity of every path, from the routers. `public_folders` are paths of public files."""

    def __init__(self, routers: Iterable[ApiRouter], public_folders: Iterable[str] = ()) -> None:
        routers = tuple(routers)
        self._public = {getattr(route, "path", "") for router in routers if router.is_public for route in router.routes}
        self._folders = tuple(f"{folder}/" for folder in public_folders)
        self._dialects = [(router.prefix, router.dialect) for router in routers if router.dialect != "openai"]

    def is_public(self, path: str) -> bool:
        """Return whether `path` needs no key."""
        return path in self._public or path.startswith(self._folders)

    def dialect(self, path: str) -> Dialect:
        """Return the dialect of the endpoint at `path`; OpenAI's for paths that belong to no router."""
        for prefix, dialect in self._dialects:
            if path == prefix or path.startswith(f"{prefix}/"):
                return dialect
        return "openai"
