"""A client in a process of its own, beside an attack: it prints the longest time that /health took, and the longest
pause of a stream that it reads, until its input ends."""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time


def watch_health(host: str, ended: threading.Event, result: dict[str, float]) -> None:
    while not ended.is_set():
        begin = time.monotonic()
        connection = http.client.HTTPConnection(host, timeout=60)
        connection.request("GET", "/health")
        connection.getresponse().read()
        connection.close()
        result["health"] = max(result["health"], time.monotonic() - begin)
        time.sleep(0.01)


def watch_streams(host: str, key: str, ended: threading.Event, result: dict[str, float]) -> None:
    """Streams of one client, one after the other: the longest wait for a first token, and between two."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    body = json.dumps({"prompt": [7, 8, 9], "max_tokens": 100, "temperature": 0, "ignore_eos": True, "stream": True})
    while not ended.is_set():
        connection = http.client.HTTPConnection(host, timeout=60)
        last, name = time.monotonic(), "first_token"
        connection.request("POST", "/v1/completions", body, headers)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        for line in answer:
            if line.startswith(b"data: {"):
                assert b'"error"' not in line, line
                now = time.monotonic()
                result[name] = max(result[name], now - last)
                last, name = now, "pause"
        connection.close()
        result["streams"] += 1


def main(host: str, key: str) -> None:
    ended, result = threading.Event(), {"health": 0.0, "first_token": 0.0, "pause": 0.0, "streams": 0.0}
    threads = [
        threading.Thread(target=watch_health, args=(host, ended, result)),
        threading.Thread(target=watch_streams, args=(host, key, ended, result)),
    ]
    for thread in threads:
        thread.start()
    print("begun", flush=True)
    sys.stdin.read()
    ended.set()
    for thread in threads:
        thread.join()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
