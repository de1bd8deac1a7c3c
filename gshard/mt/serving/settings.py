"""The settings of a server, as the options of `gshard serve` give them, and the keys of its users.

Keys have limits of texts per minute. Where a server has several workers, the counts are in memory
that they share, so that a limit is one limit. Keys are compared by their hashes.
"""

from __future__ import annotations

import hashlib
import ipaddress
import math
import multiprocessing
import re
import ssl
import threading
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from gshard.errors import UserError
from gshard.mt.typed import checked
from gshard.nn.config import SettingBounds

LOCAL = "127.0.0.1"
Logs = Literal["none", "text", "json"]
LOGS: tuple[Logs, ...] = ("none", "text", "json")
_ORIGIN = re.compile(r"\*|https?://([a-z0-9.-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")


@dataclass(frozen=True)
class Settings:
    """Where a server listens, who may use it, and how much each may ask for.

    Without keys, the random token of the page's address is the only key; `is_open` needs none.
    `proxies` are the addresses whose X-Forwarded headers are believed; behind one, and on any other
    address than this machine's, the name in a request's Host header is not checked.
    """

    host: str = LOCAL
    port: int = 8000
    tls_cert: Path | None = None
    tls_key: Path | None = None
    keys: tuple[Key, ...] = ()
    is_open: bool = False
    per_minute: int = 0  # texts of everyone without a key, together; 0 is no limit
    characters: int = 5_000  # of a request
    texts: int = 100  # of a request
    proxies: str = ""
    cors: str = ""  # the origin whose pages may use it, or *
    logs: Logs = "none"

    def __post_init__(self) -> None:
        if not (1 <= self.characters <= MOST >= self.texts >= 1 and 0 <= self.per_minute <= MOST):
            raise UserError(
                f"--char-limit and --batch-limit are at least 1, --req-limit at least 0, and each "
                f"at most {MOST:,}"
            )
        for each in self.proxies.split(",") if self.proxies not in ("", "*") else ():
            try:
                ipaddress.ip_network(each.strip())
            except ValueError as error:
                raise UserError(
                    f"--proxies {self.proxies!r}: {error}; allowed are * and addresses or networks "
                    "with commas between them, such as 127.0.0.1,10.0.0.0/8"
                ) from None
        if self.cors and not _ORIGIN.fullmatch(self.cors):
            raise UserError(
                f"--cors {self.cors!r} is no origin as browsers send it; allowed are * and an "
                "origin without a path, such as https://example.org"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UserError("--tls-cert and --tls-key belong together; give both or neither")
        if self.tls_cert is not None and self.tls_key is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            try:
                # Without a password, OpenSSL would ask the terminal for one.
                context.load_cert_chain(self.tls_cert, self.tls_key, password="")
            except OSError as error:  # of which ssl.SSLError is one
                raise UserError(
                    f"{self.tls_cert} and {self.tls_key} are not a certificate and a key in PEM: "
                    f"{error}"
                ) from None

    @property
    def checks_names(self) -> bool:
        """Whether a request must call the server by this machine's own name."""
        return is_local(self.host) and not self.proxies

    @property
    def scheme(self) -> str:
        """The scheme of its addresses."""
        return "https" if self.tls_cert else "http"


def is_local(host: str) -> bool:
    """Whether only this machine reaches a server that listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


_SHORTEST = 8  # characters of a key
TOKEN = "token"  # the name of the key that is in the page's address
MOST = 10**9  # texts per minute, or of any other limit


@dataclass(frozen=True)
class Key:
    """A key, the name that logs and metrics use for it, and its limit; 0 is none."""

    name: str
    key: str
    per_minute: Annotated[int, SettingBounds(0, MOST)] = 0


def read_keys(path: Path) -> tuple[Key, ...]:
    """The keys of a TOML file: `[[key]]` tables with name, key and, if limited, per_minute."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no file {path} with keys") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    keys: tuple[Key, ...] = checked({"key": tuple[Key, ...]}, found, f"{path}: ").get("key", ())
    if not keys:
        raise UserError(f"{path} has no keys: they are [[key]] tables with a name and a key")
    for key in keys:
        _refuse_weak(path, key)
    for what in ("name", "key"):
        values = [getattr(key, what) for key in keys]
        if twice := next((v for v in values if values.count(v) > 1), None):
            shown = f" {twice!r}" if what == "name" else ""
            raise UserError(f"{path}: two keys have the same {what}{shown}")
    return keys


def _refuse_weak(path: Path, key: Key) -> None:
    is_sent = key.key.isascii() and key.key.isprintable() and key.key.strip() == key.key
    if len(key.key) < _SHORTEST or not is_sent:
        raise UserError(
            f"{path}: {key.name!r} needs a key of {_SHORTEST} characters or more (of ASCII, as "
            f"headers are, without spaces around it)"
        )


class ApiKeys:
    """The keys that a server knows, and what each may still use in this minute.

    Each has a bucket that holds as many texts as its limit and fills at that rate. `is_open` lets
    in everyone without a key, who then share one bucket of `per_minute`. `shared` ones may be sent
    to processes, which then count together.
    """

    def __init__(
        self,
        keys: Sequence[Key],
        *,
        is_open: bool = False,
        per_minute: int = 0,
        shared: bool = False,
    ):
        self.is_open = is_open
        self._everyone = Key("everyone", "", per_minute)
        known = [*keys, *([self._everyone] if is_open else [])]
        self._known = {_digest(key.key): (n, key) for n, key in enumerate(known)}
        # For each the texts that are left, and when that was so.
        start = [x for key in known for x in (float(key.per_minute), time.monotonic())]
        self._left: Any = list(start)
        self._lock: Any = threading.Lock()
        if shared:
            self._left = multiprocessing.get_context("spawn").Array("d", start)
            self._lock = self._left.get_lock()

    def find(self, given: str) -> Key | None:
        """The key that was given, or None if nobody has it."""
        number_key = self._known.get(_digest(given))
        return None if number_key is None else number_key[1]

    @property
    def hint(self) -> str:
        """Which key to send."""
        if self.is_open:
            return "none is needed here"
        is_token = [key.name for _, key in self._known.values()] == [TOKEN]
        return f"send {'the token in the address of the page' if is_token else 'a key of yours'}"

    def wait(self, key: Key, texts: int) -> int:
        """Use so many texts of a key: 0, or the seconds after which it may be tried again.

        A request for more than a minute's worth is let through when the bucket is full.
        """
        if not key.per_minute:
            return 0
        number, _ = self._known[_digest(key.key)]
        rate = key.per_minute / 60
        with self._lock:
            left, since = self._left[2 * number : 2 * number + 2]
            now = time.monotonic()
            left = min(float(key.per_minute), left + rate * (now - since))
            needed = min(texts, key.per_minute)
            if left < needed:
                return math.ceil((needed - left) / rate)
            self._left[2 * number : 2 * number + 2] = [left - texts, now]
        return 0


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
