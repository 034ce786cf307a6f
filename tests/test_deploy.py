"""The files in `deploy/`, as far as they can be tried without Docker and Kubernetes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml

import readergroup as rg
from tests.servers.nats import NatsServer, nats_server_binary
from tests.servers.ports import free_port
from tests.servers.unavailable import ServerUnavailable

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
STREAM = "shop/orders"
GROUP = "billing"
LONG = 30.0


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


# ---------------------------------------------------------------------- what runs in the containers


@contextmanager
def running(script: Path, *arguments: str, url: str) -> Iterator[subprocess.Popen[str]]:
    environment = {
        **os.environ,
        "READERGROUP_URL": url,
        "READERGROUP_GROUP": GROUP,
        "READERGROUP_STREAMS": STREAM,
    }
    process = subprocess.Popen(
        [sys.executable, script, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_the_reader_reads_and_leaves_the_group_when_it_is_asked_to_end(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    with rg.connect(url) as client:
        client.streams.create(STREAM)
        with client.writer(STREAM, serializer=rg.JsonSerializer()) as writer:
            writer.write({"order": 1})
        with running(DEPLOY / "reader.py", url=url) as reader:
            assert reader.stdout
            assert reader.stdout.readline().endswith("{'order': 1}\n")
            group = client.groups.get(GROUP)
            assert group.online_readers() == [socket.gethostname()]
            reader.send_signal(signal.SIGTERM)
            _, errors = reader.communicate(timeout=LONG)
            assert reader.returncode == 0, errors
        assert group.online_readers() == []
        assert group.lag().events == 0


def test_the_metrics_are_answered_where_the_scaler_looks_for_them(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    port = free_port()
    with rg.connect(url) as client:
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(4))
        client.groups.create(GROUP, streams=[STREAM])
        with client.writer(STREAM, serializer=rg.JsonSerializer()) as writer:
            writer.write({"order": 1})
        _, *arguments = container_of("metrics.yaml")["command"][1:]
        arguments[arguments.index("--port") + 1] = str(port)
        with running(ROOT / "samples" / "metrics_for_keda.py", *arguments, url=url) as metrics:
            answer = _answer(metrics, f"http://127.0.0.1:{port}{trigger_url()[2]}")
            assert answer[trigger()["valueLocation"]] == 1
            assert answer["lag_events"] == 1
            metrics.send_signal(signal.SIGTERM)
            _, errors = metrics.communicate(timeout=LONG)
            assert metrics.returncode == 0, errors


def _answer(process: subprocess.Popen[str], url: str) -> Mapping[str, Any]:
    """What is answered once somebody listens."""
    pause = threading.Event()
    while process.poll() is None:
        try:
            with urlopen(url, timeout=LONG) as response:
                answer: Mapping[str, Any] = json.load(response)
                return answer
        except ConnectionRefusedError:
            pause.wait(0.05)
        except OSError as error:
            assert isinstance(getattr(error, "reason", None), ConnectionRefusedError), error
            pause.wait(0.05)
    raise AssertionError(process.communicate()[1])


# ---------------------------------------------------------------------- Kubernetes


def manifest(name: str, kind: str) -> Any:
    (found,) = [each for each in documents(DEPLOY / "kubernetes" / name) if each["kind"] == kind]
    return found


def container_of(name: str) -> Any:
    (container,) = manifest(name, "Deployment")["spec"]["template"]["spec"]["containers"]
    return container


def trigger() -> Mapping[str, str]:
    (found,) = manifest("scaling.yaml", "ScaledObject")["spec"]["triggers"]
    assert found["type"] == "metrics-api"
    metadata: Mapping[str, str] = found["metadata"]
    return metadata


def trigger_url() -> tuple[str, str, str]:
    found = re.fullmatch(r"http://([\w-]+):(\d+)(/\w+)", trigger()["url"])
    assert found
    return found[1], found[2], found[3]


def test_the_manifests_fit_each_other() -> None:
    kustomization = documents(DEPLOY / "kubernetes" / "kustomization.yaml")[0]
    files = {path.name for path in (DEPLOY / "kubernetes").glob("*.yaml")}
    assert {*kustomization["resources"], "kustomization.yaml"} == files

    scaled = manifest("scaling.yaml", "ScaledObject")["spec"]
    readers = manifest("readers.yaml", "Deployment")
    assert scaled["scaleTargetRef"]["name"] == readers["metadata"]["name"]
    assert "replicas" not in readers["spec"]

    service = manifest("metrics.yaml", "Service")
    host, port, _ = trigger_url()
    assert host == service["metadata"]["name"]
    assert [str(each["port"]) for each in service["spec"]["ports"]] == [port]
    for name in ("readers.yaml", "metrics.yaml"):
        deployment = manifest(name, "Deployment")["spec"]
        labels = deployment["template"]["metadata"]["labels"]
        assert deployment["selector"]["matchLabels"] == labels
        assert service["spec"]["selector"] == labels or name == "readers.yaml"

    container = container_of("metrics.yaml")
    assert container["ports"][0]["name"] == service["spec"]["ports"][0]["targetPort"]
    arguments = container["command"]
    assert arguments[arguments.index("--port") + 1] == str(container["ports"][0]["containerPort"])
    assert arguments[arguments.index("--max-readers") + 1] == str(scaled["maxReplicaCount"])
    environment = {each["name"]: each.get("value") for each in container_of("readers.yaml")["env"]}
    assert arguments[arguments.index("--group") + 1] == environment["READERGROUP_GROUP"]


def test_the_image_holds_what_the_manifests_run() -> None:
    image = (DEPLOY / "Dockerfile").read_text()
    copied = [part for line in re.findall(r"^COPY (.*)$", image, re.MULTILINE) for part in line.split()[:-1]]
    assert [part for part in copied if not (ROOT / part).exists()] == []
    scripts = {Path(part).name for part in copied}
    for name in ("readers.yaml", "metrics.yaml"):
        assert container_of(name)["command"][1] in scripts


# ---------------------------------------------------------------------- Compose, and the NATS nodes


def nodes() -> Mapping[str, Any]:
    services = documents(DEPLOY / "compose.yaml")[0]["services"]
    return {name: service for name, service in services.items() if name.startswith("nats-")}


def test_the_services_fit_the_configuration_of_the_nodes() -> None:
    compose = documents(DEPLOY / "compose.yaml")[0]
    configuration = (DEPLOY / "nats.conf").read_text()
    assert re.findall(r"nats://([\w-]+):6222", configuration) == list(nodes())
    used = {volume.partition(":")[0] for service in compose["services"].values() for volume in service["volumes"]}
    assert used - {"./nats.conf"} == compose["volumes"].keys()
    for name, node in nodes().items():
        assert node["environment"]["NATS_NAME"] == name
        assert f"{node['command'][1]}:ro" in node["volumes"][0]
        store = re.search(r'store_dir: "(.*)"', configuration)
        assert store and node["volumes"][1] == f"{name}:{store[1]}"
        assert "http: " in configuration and node["healthcheck"]["test"][-1].endswith(":8222/healthz")
        # What the store needs; see `OLDEST_VERSION`.
        version = re.fullmatch(r"nats:(\d+)\.(\d+)-alpine", node["image"])
        assert version and (int(version[1]), int(version[2])) >= (2, 12)


def test_the_configuration_of_the_nodes_makes_a_cluster_that_serves_the_printed_address(tmp_path: Path) -> None:
    """The file as it is, but for where this machine differs: ports, names of hosts, and the folder of the data."""
    try:
        program = nats_server_binary()
    except ServerUnavailable as reason:
        pytest.skip(f"no NATS server here: {reason}")
    ports = {name: {old: free_port() for old in ("4222", "8222", "6222")} for name in nodes()}
    started: list[subprocess.Popen[bytes]] = []
    try:
        for name, own in ports.items():
            text = (DEPLOY / "nats.conf").read_text().replace('"/data"', f'"{tmp_path / name}"')
            for node, others in ports.items():
                text = text.replace(f"{node}:6222", f"127.0.0.1:{others['6222']}")
            for old, new in own.items():
                text = text.replace(f"0.0.0.0:{old}", f"127.0.0.1:{new}")
            path = tmp_path / f"{name}.conf"
            path.write_text(text)
            command = [program, *nodes()[name]["command"][:1], str(path)]
            process = subprocess.Popen(
                command, env={**os.environ, "NATS_PASSWORD": "secret", "NATS_NAME": name}, stderr=subprocess.DEVNULL
            )
            started.append(process)
        hosts = ",".join(f"127.0.0.1:{own['4222']}" for own in ports.values())
        printed = re.search(r"nats://shop:\.\.\.@\S+\?(\S+)", (DEPLOY / "compose.yaml").read_text())
        assert printed
        with _opened(f"nats://shop:secret@{hosts}?{printed[1]}") as client:
            assert client.streams.create(STREAM)
    finally:
        for process in started:
            process.kill()
            process.wait()


@contextmanager
def _opened(url: str) -> Iterator[rg.Client]:
    """A client, as soon as the nodes have found each other."""
    pause = threading.Event()
    for _ in range(600):
        try:
            client = rg.connect(url)
        except (rg.StoreUnavailableError, rg.UnsupportedError):
            pause.wait(0.05)
        else:
            with client:
                yield client
            return
    raise AssertionError("the nodes do not become a cluster")


def test_the_tests_run_on_nodes_that_sync_as_the_configuration_says() -> None:
    assert "sync_interval: always" in (DEPLOY / "nats.conf").read_text()
    assert any("sync_interval: always" in line for line in NatsServer()._configuration())
