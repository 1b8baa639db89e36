"""Headless Chromium on a page that asks again and again: what it shows after a while, asked over its debugging port."""

import base64
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE_S = 60


class Browser:
    """One page. Every message of its console and every request it makes is kept."""

    def __init__(self, profile: Path, width: int = 1280, height: int = 1400) -> None:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
        flags += ["--disable-background-networking", "--disable-component-update", f"--window-size={width},{height}"]
        flags += ["--remote-debugging-port=0", f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            [str(CHROMIUM), *flags, "about:blank"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        port, path = self._debugging_address()
        self._connection = _WebSocket(port, path)
        self._number = 0
        self.console: list[str] = []
        self.requested: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Network", "Page"):
            self._call(f"{domain}.enable", session=self._session)

    def _debugging_address(self) -> tuple[int, str]:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            found = re.search(rb"ws://127\.0\.0\.1:(\d+)(/\S+)", line)
            if found:
                return int(found.group(1)), found.group(2).decode()
        raise AssertionError("the browser did not start")

    def open(self, url: str) -> None:
        self._call("Page.navigate", session=self._session, url=url)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        result = self._call(
            "Runtime.evaluate", session=self._session, expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, condition: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not self.evaluate(condition):
            assert time.monotonic() < deadline, f"never: {condition}"
            time.sleep(0.05)

    def use_colours(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", session=self._session, features=features)

    def resize(self, width: int, height: int) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride",
            session=self._session,
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def close(self) -> None:
        self._connection.close()
        self._process.terminate()
        self._process.communicate(timeout=PATIENCE_S)

    def _call(self, method: str, *, session: str | None = None, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        self._connection.send(json.dumps(message).encode())
        while True:
            answer = json.loads(self._connection.receive())
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer.get("method"), answer.get("params", {}))

    def _note(self, method: str | None, event: Any) -> None:
        if method == "Network.requestWillBeSent":
            self.requested.append(event["request"]["url"])
        elif method == "Runtime.consoleAPICalled":
            self.console.append(str([part.get("value") for part in event["args"]]))
        elif method == "Runtime.exceptionThrown":
            self.console.append(str(event["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.console.append(event["entry"]["text"])


class _WebSocket:
    """As much of RFC 6455 as a client of a well-behaved server needs."""

    def __init__(self, port: int, path: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        key = base64.b64encode(os.urandom(16)).decode()
        head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        self._socket.sendall(f"{head}Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode())
        self._reader = self._socket.makefile("rb")
        assert b" 101 " in self._reader.readline()
        while self._reader.readline() != b"\r\n":
            pass

    def send(self, text: bytes) -> None:
        mask = os.urandom(4)
        masked = bytes(byte ^ mask[place % 4] for place, byte in enumerate(text))
        self._socket.sendall(struct.pack("!BBQ", 0x81, 0xFF, len(text)) + mask + masked)

    def receive(self) -> bytes:
        whole = b""
        while True:
            first, length = self._reader.read(2)
            if length == 126:
                (length,) = struct.unpack("!H", self._reader.read(2))
            elif length == 127:
                (length,) = struct.unpack("!Q", self._reader.read(8))
            whole += self._reader.read(length)
            if first & 0x80:
                return whole

    def close(self) -> None:
        self._reader.close()
        self._socket.close()
