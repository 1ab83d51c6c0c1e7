"""Cache events as their readers get them."""

from __future__ import annotations

from typing import Any, get_args

from ostinato.kv_cache.cache_events import CacheEvent

KINDS: dict[str, type[CacheEvent]] = {kind.__name__: kind for kind in get_args(CacheEvent)}


def event_of(fields: dict[str, Any]) -> CacheEvent:
    kind = KINDS[fields["type"]]
    return kind(**{name: fields[name] for name in kind.__dataclass_fields__})
