"""Certificates for tests, made by the machine's openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by openssl")

_CA = """
[ca]
default_ca = own
[own]
database = index
serial = serial
new_certs_dir = .
default_md = sha256
policy = any
[any]
commonName = supplied
"""


def make_certificate(directory: Path, name: str = "server") -> tuple[Path, Path]:
    """A certificate of its own for localhost, and its key."""
    certfile, keyfile = directory / f"{name}.pem", directory / f"{name}.key"
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", str(keyfile)]
    names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    _openssl(directory, "req", "-x509", *key, "-out", str(certfile), "-days", "30", *names)
    return certfile, keyfile


def make_certificate_of(directory: Path, begin: str, end: str) -> tuple[Path, Path]:
    """The same, valid between two moments such as 20200101000000Z."""
    certfile, keyfile = directory / f"{begin}.pem", directory / f"{begin}.key"
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", str(keyfile)]
    _openssl(directory, "req", *key, "-out", "request", "-subj", "/CN=localhost")
    for file, text in (("index", ""), ("serial", "01"), ("ca.cnf", _CA)):
        (directory / file).write_text(text)
    dates = ["-startdate", begin, "-enddate", end]
    signed = ["-selfsign", "-keyfile", str(keyfile), "-in", "request", "-out", str(certfile)]
    _openssl(directory, "ca", "-batch", "-notext", "-config", "ca.cnf", *signed, *dates)
    return certfile, keyfile


def lock(keyfile: Path, password: str) -> Path:
    """The key, encrypted."""
    locked = keyfile.with_suffix(".locked")
    _openssl(
        keyfile.parent, "pkey", "-in", str(keyfile), "-aes256", "-passout", f"pass:{password}", "-out", str(locked)
    )
    return locked


def _openssl(directory: Path, *arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], cwd=directory, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
