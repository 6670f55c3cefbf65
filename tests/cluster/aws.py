"""EC2 on loopback: a real `moto` server, in front of it a door that can refuse, and an agent that boots machines.

What AWS does and moto does not: a sold-out type is refused with AWS's own words, and a machine runs its user-data.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import os
import shutil
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.http_server import Answer, Asked, answering
from tests.cluster.servers import free_port, wait_for_port

MOTO = """\
moto==5.2.5 boto3==1.44.8 botocore==1.44.8 s3transfer==0.19.3 jmespath==1.1.0 python-dateutil==2.9.0.post0 six==1.17.0
urllib3==2.8.0 requests==2.34.2 certifi==2026.10.19.post1 charset-normalizer==3.5.3 idna==3.20 cryptography==50.0.2
cffi==2.1.1 pycparser==3.12 responses==0.26.3 PyYAML==6.0.4 Werkzeug==3.1.9 xmltodict==1.0.4 Flask==3.1.3
flask-cors==6.0.5 click==8.5.1 blinker==1.9.0 itsdangerous==2.2.0 Jinja2==3.1.6 MarkupSafe==3.0.4
"""
"""In an environment of its own: it wants another botocore than aiobotocore does."""
INSTALL_S = 240.0
IMAGE = "ami-03cf127a"
"""Of moto's own."""
LOOK_S = 0.2
ERROR = (
    '<?xml version="1.0"?><Response><Errors><Error><Code>{code}</Code><Message>{message}</Message></Error></Errors>'
    "<RequestID>0</RequestID></Response>"
)
XML = {"Content-Type": "text/xml"}
REFUSALS = {
    "InsufficientInstanceCapacity": (500, "We currently do not have sufficient capacity for that instance type."),
    "MaxSpotInstanceCountExceeded": (400, "Max spot instance count exceeded"),
    "UnauthorizedOperation": (403, "You are not authorized to perform this operation."),
    "InvalidAMIID.NotFound": (400, "The image id does not exist"),
}


def moto_program() -> Path:
    """Made once, kept in the cache. Skips the test where it cannot be."""
    folder = Path.home() / ".cache" / "pearl" / f"moto-{MOTO.split()[0].partition('==')[2]}"
    program = folder / "bin" / "moto_server"
    if not program.exists():
        try:
            for line in (
                [sys.executable, "-m", "venv", str(folder)],
                [str(folder / "bin" / "pip"), "install", "--quiet", "--no-deps", *MOTO.split()],
            ):
                subprocess.run(line, check=True, capture_output=True, text=True, timeout=INSTALL_S)
        except (subprocess.SubprocessError, OSError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
            pytest.skip(f"moto could not be installed: {said}")
    return program


@dataclass
class Aws:
    url: str
    """Of the door."""
    refused: dict[str, str] = field(default_factory=dict)
    """RunInstances with that instance type ("*" is any) gets that error."""
    asked: list[dict[str, str]] = field(default_factory=list)
    """RunInstances that came, as they were on the wire; not the dry ones."""
    came: threading.Event = field(default_factory=threading.Event)
    """One has come."""
    answers: threading.Event = field(default_factory=threading.Event)
    """They wait for it."""
    _client: Any = None

    def client(self) -> Any:
        import botocore.session

        if self._client is None:
            session = botocore.session.get_session()
            self._client = session.create_client("ec2", region_name="us-east-1", endpoint_url=self.url)
        return self._client

    def instances(self) -> dict[str, dict[str, Any]]:
        found = [i for r in self.client().describe_instances()["Reservations"] for i in r["Instances"]]
        return {instance["InstanceId"]: instance for instance in found}

    def reset(self) -> None:
        """As it was when it was started."""
        for what, body in (("reset", b""), ("reset-auth", b"inf")):
            self._tell_moto(what, body)
        self.refused.clear()
        self.asked.clear()
        self.came.clear()
        self.answers.set()

    def require_keys(self) -> None:
        """From now on only known keys are taken."""
        self._tell_moto("reset-auth", b"0")

    def _tell_moto(self, what: str, body: bytes) -> None:
        form = {"Content-Type": "text/plain"}
        request = urllib.request.Request(f"{self.url}/moto-api/{what}", body, form, method="POST")
        urllib.request.urlopen(request, timeout=30).close()

    def alive(self) -> list[str]:
        return [i for i, instance in self.instances().items() if instance["State"]["Name"] in ("pending", "running")]

    def user_data(self, instance: str) -> str:
        """Empty if it has none."""
        found = self.client().describe_instance_attribute(InstanceId=instance, Attribute="userData")
        return base64.b64decode(found["UserData"].get("Value", "")).decode()

    def security_group(self) -> str:
        vpc = self.client().describe_vpcs()["Vpcs"][0]["VpcId"]
        return str(self.client().create_security_group(GroupName="pearl", Description="d", VpcId=vpc)["GroupId"])


@contextlib.contextmanager
def aws(folder: Path) -> Iterator[Aws]:
    """The environment must have AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of nobody."""
    program, port = moto_program(), free_port()
    folder.mkdir(parents=True)
    with (folder / "moto.log").open("wb") as output:
        line = [str(program), "-H", "127.0.0.1", "-p", str(port)]
        server = subprocess.Popen(line, stdout=output, stderr=output, cwd=folder)
    cloud = Aws("")

    def answer(asked: Asked) -> Answer:
        said = dict(urllib.parse.parse_qsl(asked.body.decode()))
        if said.get("Action") == "RunInstances" and said.get("DryRun") != "true":
            cloud.asked.append(said)
            cloud.came.set()
            cloud.answers.wait(30)
            if code := cloud.refused.get(said.get("InstanceType", ""), cloud.refused.get("*")):
                status, message = REFUSALS[code]
                return Answer(status, ERROR.format(code=code, message=message).encode(), XML)
        moto = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        moto.request("POST", asked.path, asked.body, dict(asked.headers))
        reply = moto.getresponse()
        return Answer(reply.status, reply.read(), XML)

    try:
        wait_for_port(port, server, folder / "moto.log")
        with answering(answer) as cloud.url:
            cloud.answers.set()
            yield cloud
    finally:
        server.terminate()
        server.wait(30)


class BootAgent:
    """Runs the user-data of each machine that runs, as a machine of its own name, until either ends."""

    def __init__(self, cloud: Aws, folder: Path) -> None:
        self.cloud, self.folder = cloud, folder
        self.machines: dict[str, subprocess.Popen[bytes]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> BootAgent:
        (self.folder / "bin").mkdir(parents=True)
        shutdown = self.folder / "bin" / "shutdown"
        shutdown.write_text("#!/bin/sh\nexit 0\n")  # this machine is to stay: the end of the script is the end
        shutdown.chmod(0o755)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for machine in self.machines.values():
            _power_off(machine)

    def log(self, instance: str) -> str:
        return (self.folder / f"{instance}.log").read_text()

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            for name, instance in self.cloud.instances().items():
                state, machine = instance["State"]["Name"], self.machines.get(name)
                if state == "running" and machine is None:
                    if script := self.cloud.user_data(name):
                        self.machines[name] = self._boot(name, script)
                elif state == "running" and machine is not None and machine.poll() is not None:
                    self.cloud.client().terminate_instances(InstanceIds=[name])  # as its shutdown behaviour says
                elif state in ("shutting-down", "terminated") and machine is not None:
                    _power_off(machine)

    def _boot(self, instance: str, user_data: str) -> subprocess.Popen[bytes]:
        script = self.folder / f"{instance}.sh"
        script.write_text(user_data)
        script.chmod(0o700)
        own = {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "PEARL_HOST": instance}
        with (self.folder / f"{instance}.log").open("wb") as output:
            return subprocess.Popen(
                [str(script)], env=own, stdout=output, stderr=output, start_new_session=True, cwd="/"
            )


def _power_off(machine: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [*psutil.Process(machine.pid).children(recursive=True), psutil.Process(machine.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    machine.wait()
