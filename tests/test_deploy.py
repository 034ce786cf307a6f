"""The files in `deploy/`, as far as they can be tried without Docker and Kubernetes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import ssl
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import yaml
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

import readergroup as rg
from readergroup.serve.metrics import StoreMetrics
from readergroup.serve.sampler import Sampler
from readergroup.serve.watching import Watches
from readergroup.telemetry import PrometheusCollector
from synchronizer.stores.nats.address import parse_address
from synchronizer.stores.nats.connection import NatsConnection
from tests.places import DOCS, ROOT
from tests.servers.certificates import Authority
from tests.servers.guard import Guard
from tests.servers.nats import NatsServer, nats_server_binary
from tests.servers.ports import free_port
from tests.servers.unavailable import ServerUnavailable
from tests.waiting import PATIENCE_SECONDS, until

DEPLOY = ROOT / "deploy"
STREAM = "shop/orders"
DEAD = "shop/orders-dead"
GROUP = "billing"
LONG = PATIENCE_SECONDS


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


# ---------------------------------------------------------------------- what runs in the containers


@contextmanager
def running(script: Path | str, *arguments: str, url: str, **more: str) -> Iterator[subprocess.Popen[str]]:
    environment = {
        **os.environ,
        "READERGROUP_URL": url,
        "READERGROUP_GROUP": GROUP,
        "READERGROUP_STREAMS": STREAM,
        "READERGROUP_DEAD_LETTERS": DEAD,
        **more,
    }
    process = subprocess.Popen(
        [sys.executable, script, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_the_reader_sets_aside_what_is_no_json_and_leaves_the_group_when_it_is_asked_to_end(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    with rg.connect(url) as client:
        for stream in (STREAM, DEAD):
            client.streams.create(stream)
        with client.writer(STREAM) as writer:
            writer.write_many([b"no JSON", b'{"order": 1}'])
        with running(DEPLOY / "reader.py", url=url) as reader:
            assert reader.stdout
            assert reader.stdout.readline().endswith("{'order': 1}\n")
            (letter,) = client.dead_letters(DEAD).list()
            assert letter.letter.data == b"no JSON"
            group = client.groups.get(GROUP)
            assert [each.startswith(socket.gethostname()) for each in group.online_readers()] == [True]
            reader.send_signal(signal.SIGTERM)
            _, errors = reader.communicate(timeout=LONG)
            assert reader.returncode == 0, errors
        assert group.online_readers() == []
        assert group.lag().events == 0


def test_the_number_of_readers_is_answered_where_the_scaler_looks_for_it(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    port = free_port()
    token = "as-in-the-secret-of-the-manifests"
    with rg.connect(url) as client:
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(4))
        client.groups.create(GROUP, streams=[STREAM])
        with client.writer(STREAM, serializer=rg.JsonSerializer()) as writer:
            writer.write({"order": 1})
        command, *arguments = container_of("serve.yaml")["command"]
        assert command == "readergroup"
        arguments[arguments.index("--port") + 1] = str(port)
        with running("-m", "readergroup.cli", *arguments, url=url, READERGROUP_SERVE_TOKEN=token) as serving:
            assert serving.stdout
            assert serving.stdout.readline().startswith("http://0.0.0.0:")
            request = Request(
                f"http://127.0.0.1:{port}{trigger_url()[2]}", headers={"Authorization": f"Bearer {token}"}
            )
            with urlopen(request, timeout=LONG) as response:
                answer = json.load(response)
            assert 1 <= answer[trigger()["valueLocation"]] <= 4  # by the age of the event
            assert answer["lag_events"] == 1
            probes = [
                container_of("serve.yaml")[f"{kind}Probe"]["httpGet"]["path"] for kind in ("readiness", "liveness")
            ]
            for path in probes:
                with urlopen(f"http://127.0.0.1:{port}{path}", timeout=LONG) as response:
                    assert response.status == 200
            serving.send_signal(signal.SIGTERM)
            _, errors = serving.communicate(timeout=LONG)
            assert serving.returncode == 0, errors


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
    found = re.fullmatch(r"http://([\w-]+):(\d+)(/\S+)", trigger()["url"])
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

    service = manifest("serve.yaml", "Service")
    host, port, _ = trigger_url()
    assert host == service["metadata"]["name"]
    assert [str(each["port"]) for each in service["spec"]["ports"]] == [port]
    for name in ("readers.yaml", "serve.yaml"):
        deployment = manifest(name, "Deployment")["spec"]
        labels = deployment["template"]["metadata"]["labels"]
        assert deployment["selector"]["matchLabels"] == labels
        assert service["spec"]["selector"] == labels or name == "readers.yaml"

    container = container_of("serve.yaml")
    assert container["ports"][0]["name"] == service["spec"]["ports"][0]["targetPort"]
    arguments = container["command"]
    assert arguments[arguments.index("--port") + 1] == str(container["ports"][0]["containerPort"])
    environment = {each["name"]: each.get("value") for each in container_of("readers.yaml")["env"]}
    path = f"/groups/{environment['READERGROUP_GROUP']}/desired-readers?max_readers={scaled['maxReplicaCount']}"
    assert trigger_url()[2] == path

    authentication = manifest("scaling.yaml", "TriggerAuthentication")
    (found,) = manifest("scaling.yaml", "ScaledObject")["spec"]["triggers"]
    assert found["authenticationRef"]["name"] == authentication["metadata"]["name"]
    (secret,) = authentication["spec"]["secretTargetRef"]
    (token,) = [each for each in container["env"] if each["name"] == "READERGROUP_SERVE_TOKEN"]
    assert token["valueFrom"]["secretKeyRef"] == {"name": secret["name"], "key": secret["key"]}


def test_the_image_holds_what_the_manifests_run() -> None:
    image = (DEPLOY / "Dockerfile").read_text()
    copied = [part for line in re.findall(r"^COPY (.*)$", image, re.MULTILINE) for part in line.split()[:-1]]
    assert [part for part in copied if not (ROOT / part).exists()] == []
    scripts = {Path(part).name for part in copied}
    assert container_of("readers.yaml")["command"][1] in scripts
    assert container_of("serve.yaml")["command"][0] == "readergroup" and "serve]" in image


# ---------------------------------------------------------------------- Compose, and the NATS nodes


def nodes() -> Mapping[str, Any]:
    services = documents(DEPLOY / "compose.yaml")[0]["services"]
    return {name: service for name, service in services.items() if name.startswith("nats-")}


def test_the_services_fit_the_configuration_of_the_nodes() -> None:
    compose = documents(DEPLOY / "compose.yaml")[0]
    configuration = (DEPLOY / "nats.conf").read_text()
    used = {volume.partition(":")[0] for service in compose["services"].values() for volume in service["volumes"]}
    assert used - {"./nats.conf", "./certificates/nodes"} == compose["volumes"].keys()
    for name, node in nodes().items():
        environment = node["environment"]
        assert environment["NATS_NAME"] == name
        assert re.findall(r"nats://node:\$\{NATS_ROUTE_PASSWORD\}@([\w-]+):6222", environment["NATS_ROUTES"]) == list(
            nodes()
        )
        assert set(re.findall(r"\$(NATS_\w+)", configuration)) == environment.keys()
        assert f"{node['command'][1]}:ro" in node["volumes"][0]
        assert node["volumes"][1] == "./certificates/nodes:/certificates:ro"
        store = re.search(r'store_dir: "(.*)"', configuration)
        assert store and node["volumes"][2] == f"{name}:{store[1]}"
        assert "http: " in configuration and node["healthcheck"]["test"][-1].endswith(":8222/healthz")
        # What the store needs; see `OLDEST_VERSION`.
        version = re.fullmatch(r"nats:(\d+)\.(\d+)-alpine", node["image"])
        assert version and (int(version[1]), int(version[2])) >= (2, 12)


class Nodes:
    """Three servers on the file as it is, but for where this machine differs: ports, names of hosts, and folders."""

    def __init__(self, folder: Path) -> None:
        try:
            self._program = nats_server_binary()
        except ServerUnavailable as reason:
            pytest.skip(f"no NATS server here: {reason}")
        self._folder = folder
        self._ports = {name: {old: free_port() for old in ("4222", "8222", "6222")} for name in nodes()}
        self._started = ExitStack()
        self.authority = Authority(folder / "certificates")
        self.authority.issue("node")

    @property
    def url(self) -> str:
        """The address that is printed."""
        hosts = ",".join(f"127.0.0.1:{own['4222']}" for own in self._ports.values())
        printed = re.search(r"nats://shop:\.\.\.@\S+\?(\S+)", (DEPLOY / "compose.yaml").read_text())
        assert printed
        return f"nats://shop:password1@{hosts}?{printed[1].replace('ca.pem', str(self.authority.certificate))}"

    @property
    def admin_url(self) -> str:
        return self.url.replace("//shop:password1@", "//admin:password2@")

    def routes(self, password: str) -> list[str]:
        return [f"nats://node:{password}@127.0.0.1:{own['6222']}" for own in self._ports.values()]

    def names_of_members(self) -> set[str]:
        """The servers that any of the nodes has a route to."""
        members = set()
        for own in self._ports.values():
            with urlopen(f"http://127.0.0.1:{own['8222']}/routez", timeout=LONG) as answer:
                members |= {route["remote_name"] for route in json.load(answer)["routes"]}
        return members

    def refusals(self) -> int:
        """How many servers the nodes have refused so far."""
        logs = [self._log(name).read_text() for name in self._ports]
        return sum(len(re.findall("TLS route handshake error|rid:.*authentication error", log)) for log in logs)

    @contextmanager
    def running(self, name: str, configuration: str, environment: Mapping[str, str] = {}) -> Iterator[None]:
        """A server."""
        path = self._folder / f"{name}.conf"
        path.write_text(configuration)
        (option,) = {node["command"][0] for node in nodes().values()}
        with open(self._log(name), "wb") as output:
            process = subprocess.Popen(
                [self._program, option, str(path)], env={**os.environ, **environment}, stderr=output, stdout=output
            )
        guard = Guard(process.pid)
        try:
            yield
        finally:
            process.kill()
            process.wait()
            guard.dismiss()

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def __enter__(self) -> Nodes:
        for name, own in self._ports.items():
            text = (DEPLOY / "nats.conf").read_text().replace('"/data"', f'"{self._folder / name}"')
            text = text.replace('"/certificates/', f'"{self.authority.certificate.parent}/')
            for old, new in own.items():
                text = text.replace(f"0.0.0.0:{old}", f"127.0.0.1:{new}")
            environment = {
                "NATS_NAME": name,
                "NATS_PASSWORD": "password1",
                "NATS_ADMIN_PASSWORD": "password2",
                "NATS_ROUTE_PASSWORD": "password3",
                "NATS_ROUTES": json.dumps(self.routes("password3")),
            }
            self._started.enter_context(self.running(name, text, environment))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._started.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with Nodes(tmp_path_factory.mktemp("nodes")) as cluster:
        with _opened(cluster.url) as client:
            assert client.streams.create(STREAM)
        yield cluster


def test_the_configuration_of_the_nodes_makes_a_cluster_that_serves_the_printed_address(cluster: Nodes) -> None:
    with _opened(cluster.url) as client:
        assert list(client.streams.list()) == [STREAM]
    until(lambda: cluster.names_of_members() == set(nodes()), "each node has a route")


def test_clients_of_the_nodes_need_tls_and_a_password(cluster: Nodes) -> None:
    for wrong in (
        cluster.url.replace("password1", "password3"),
        cluster.url.partition("&tls_ca=")[0],
        cluster.url.replace("//shop:password1@", "//"),
    ):
        with pytest.raises(rg.StoreUnavailableError):
            rg.connect(f"{wrong}&timeout_seconds=2")


def test_who_reads_and_writes_may_not_delete_what_the_nodes_store(cluster: Nodes) -> None:
    deletion = "$JS.API.STREAM.DELETE.readergroup"
    with closing(NatsConnection(parse_address(cluster.url)).open()) as connection:
        with pytest.raises(rg.StoreUnavailableError, match="may not publish"):
            connection.ask(deletion, b"")
    with closing(NatsConnection(parse_address(cluster.admin_url)).open()) as connection:
        assert "error" not in connection.ask(deletion.replace("DELETE", "INFO"), b"").document


@pytest.mark.parametrize("certificate", ["none", "of another authority", "of the nodes"])
def test_a_server_of_a_stranger_does_not_join_the_nodes(cluster: Nodes, tmp_path: Path, certificate: str) -> None:
    """Else it could do what it likes with all that is stored. It has the password or a certificate, not both."""
    name = f"stranger-{certificate.replace(' ', '-')}"
    folder = cluster.authority.certificate.parent if certificate == "of the nodes" else tmp_path
    if certificate == "of another authority":
        Authority(folder).issue("node")
    password = "guess" if certificate == "of the nodes" else "password3"
    tls = (
        ""
        if certificate == "none"
        else f'tls {{ cert_file: "{folder}/node.pem", key_file: "{folder}/node-key.pem",'
        f' ca_file: "{cluster.authority.certificate}" }}'
    )
    configuration = f"""
        server_name: {name}
        listen: "127.0.0.1:{free_port()}"
        cluster {{
            name: readergroup
            listen: "127.0.0.1:{free_port()}"
            {tls}
            routes: {json.dumps(cluster.routes(password))}
        }}
    """
    before = cluster.refusals()
    with cluster.running(name, configuration):
        until(lambda: name in cluster.names_of_members() or cluster.refusals() >= before + 5)
        assert name not in cluster.names_of_members()


def test_the_script_makes_certificates_that_nodes_and_clients_accept(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here")
    made = tmp_path / "made"
    subprocess.run([DEPLOY / "certificates.sh", made], check=True, capture_output=True)
    assert {path.name for path in (made / "nodes").iterdir()} == {"ca.pem", "node.pem", "node-key.pem"}
    server_side = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=made / "nodes" / "ca.pem")
    server_side.load_cert_chain(made / "nodes" / "node.pem", made / "nodes" / "node-key.pem")
    server_side.verify_mode = ssl.CERT_REQUIRED
    client_side = ssl.create_default_context(cafile=made / "nodes" / "ca.pem")
    client_side.load_cert_chain(made / "nodes" / "node.pem", made / "nodes" / "node-key.pem")
    for name in (*nodes(), "localhost", "127.0.0.1"):
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = server_side.wrap_bio(to_server, to_client, server_side=True)
        client = client_side.wrap_bio(to_client, to_server, server_hostname=name)
        for _ in range(3):
            for side in (client, server):
                with suppress(ssl.SSLWantReadError):
                    side.do_handshake()
        assert client.version() == server.version() is not None
        assert server.getpeercert()


@contextmanager
def _opened(url: str) -> Iterator[rg.Client]:
    """A client, as soon as the nodes have found each other."""
    found: list[rg.Client] = []

    def is_there() -> bool:
        with suppress(rg.StoreUnavailableError, rg.UnsupportedError):
            found.append(rg.connect(url))
        return bool(found)

    until(is_there, "the nodes become a cluster")
    with found[0] as client:
        yield client


def test_the_tests_run_on_nodes_that_sync_as_the_configuration_says() -> None:
    assert "sync_interval: always" in (DEPLOY / "nats.conf").read_text()
    assert any("sync_interval: always" in line for line in NatsServer()._configuration())


# ---------------------------------------------------------------------- Prometheus and Grafana


def exported(tmp_path: Path) -> set[str]:
    """The metrics of ``readergroup serve``, after everything that has metrics of its own has happened."""
    with rg.connect(f"sqlite:///{tmp_path}/shop.db") as client:
        client.streams.create(STREAM)
        group = client.groups.create(GROUP, streams=[STREAM])
        outbox = rg.Outbox(client, lambda: sqlite3.connect(tmp_path / "app.db"))
        outbox.create_table()
        sampler = Sampler(client, interval_seconds=5, outbox=outbox)
        sampler.take()
        group.checkpoint("nightly")
        sampler.take()
        text = StoreMetrics(sampler, Watches(sampler), sampler.sample).text().decode()
    families = list(text_string_to_metric_families(text))
    assert all(family.documentation for family in families)
    return {name_in_queries(family) for family in families}


def name_in_queries(family: Metric) -> str:
    return family.name + {"counter": "_total", "histogram": "_bucket"}.get(family.type, "")


def expressions() -> Iterator[str]:
    rules = documents(DEPLOY / "prometheus" / "alerts.yaml")[0]
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        assert {"alert", "expr", "for", "labels", "annotations"} == rule.keys()
        yield rule["expr"]
    dashboard = json.loads((DEPLOY / "prometheus" / "dashboard.json").read_text())
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (each["query"] for each in dashboard["templating"]["list"] if each["type"] == "query")


def test_alerts_the_dashboard_and_the_page_name_metrics_that_exist(tmp_path: Path) -> None:
    exist = exported(tmp_path)
    named = {name for expression in expressions() for name in re.findall(r"readergroup_\w+", expression)}
    with rg.connect("memory://") as client:
        of_processes = {name_in_queries(family) for family in PrometheusCollector(client).collect()}
    assert named - exist - of_processes == set()
    rows = re.findall(r"^\| (`readergroup_.*?) \|", (DOCS / "howto/see-it-in-a-browser.md").read_text(), re.MULTILINE)
    documented = set()
    for row in rows:
        first, *others = re.findall(r"`(\w+)`", row)
        documented.add(first)
        for name in others:  # `_lag_bytes` is short for a name that begins as the first one
            stem = first[: first.index("_", len("readergroup_"))]
            documented.add(stem + name if name.startswith("_") else name)
    assert documented == {name.removesuffix("_bucket") for name in exist}
