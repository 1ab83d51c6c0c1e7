"""Start `ostinato serve` on a free port and ask it with OpenAI's package.

Run it:    .venv/bin/pip install openai && .venv/bin/python examples/server_and_client.py

It prints:

    the server is ready
    8 * 6 = 48. #### 48
    50 - 8 = 42. #### 42
"""

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

from openai import OpenAI

PATIENCE = 120
"""Seconds that the server may take to start."""


def main() -> None:
    """Serve, ask for a whole answer and for a stream, and stop the server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = [sys.executable, "-m", "ostinato", "serve", "demo", "--max-num-seqs", "4", "--port", str(port)]
    server = subprocess.Popen(serve, stderr=subprocess.DEVNULL)
    try:
        wait_until_ready(server, f"http://127.0.0.1:{port}/health")
        print("the server is ready")
        ask(OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none"))
    finally:
        server.terminate()  # it answers what it has, and ends
        server.wait()


def wait_until_ready(server: subprocess.Popen, health: str) -> None:
    """Return once the server answers with status 200; raise if it ends or takes too long."""
    end = time.monotonic() + PATIENCE
    while server.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(health):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise RuntimeError("the server did not start")


def ask(client: OpenAI) -> None:
    """Print two answers: one that comes whole, one that comes in pieces."""
    question = {"role": "user", "content": "Mia buys 8 boxes of 6 pencils. How many pencils is that?"}
    answer = client.chat.completions.create(model="demo", messages=[question])
    print(answer.choices[0].message.content.strip())

    question = {"role": "user", "content": "Leo had 50 cards and lost 8. How many cards are left?"}
    for chunk in client.chat.completions.create(model="demo", messages=[question], stream=True):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
