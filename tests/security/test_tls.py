"""TLS between real processes: who gets through, and what the others are told in one line."""

import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
from certificates import Authority, authority
from house import House
from service_processes import BIN, CollectorProcess, wait_until
from service_records import append_steps, identity

from stagewatch.agents.ring import RingWriter
from stagewatch.agents.tls import ClientTls
from stagewatch.monitor.tls import ServerTls


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return authority(tmp_path, "ca")


def trusting(ca: Authority, cert: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(ca.file))
    if cert:
        context.load_cert_chain(cert, key)
    return context


def collector(house: House, ca: Authority, *options: str | Path, verify: Any = None) -> CollectorProcess:
    cert, key = ca.issue("server")
    return house.collector("--tls-cert", cert, "--tls-key", key, *options, verify=verify or trusting(ca))


def said_by(house: House, url: str, *options: str | Path) -> str:
    """What a sidecar says of a collector that it does not reach."""
    sidecar = house.ship(url, "t" * 20, *options)
    wait_until(lambda: "not connected" in sidecar.output, "it says why")
    assert sidecar.end() == 0
    lines = [line for line in sidecar.output.splitlines() if "not connected" in line]
    assert len(lines) == 1
    assert "Traceback" not in sidecar.output
    return lines[0].partition("not connected: ")[2]


def wss(found: CollectorProcess) -> str:
    assert found.url.startswith("https://")
    return found.url.replace("https", "wss")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")  # to ask for what nobody should
def test_evidence_arrives_and_old_versions_of_tls_do_not(house: House, ca: Authority) -> None:
    found = collector(house, ca)
    house.ring_dir.mkdir(mode=0o700)
    for stage in (0, 1):
        append_steps(RingWriter(house.ring_dir, identity(stage), 1 << 20), 5)
    house.ship(wss(found), found.token, "--tls-ca", ca.file)
    wait_until(lambda: found.last_step("life-1.1") == 5, "the evidence arrives")
    old = trusting(ca)
    old.minimum_version = ssl.TLSVersion.TLSv1
    old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{found.url}/healthz", verify=old)


def test_neither_end_offers_an_old_version(ca: Authority) -> None:
    cert, key = ca.issue("server")
    contexts = (ServerTls(cert, key, ca.file).context(), ClientTls(ca.file).context(), ClientTls().context())
    for context in contexts:
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2
        assert context.verify_mode == ssl.CERT_REQUIRED
    assert [context.check_hostname for context in contexts] == [False, True, True]


@pytest.mark.parametrize("case", ["another authority", "nobody's", "expired", "another name", "plain"])
def test_what_is_wrong_is_told_in_one_line(house: House, tmp_path: Path, ca: Authority, case: str) -> None:
    loose = ssl.create_default_context()
    loose.check_hostname, loose.verify_mode = False, ssl.CERT_NONE
    issued = {
        "expired": ca.issue("server", days=-1),
        "another name": ca.issue("server2", host="collector.example"),
    }.get(case, ca.issue("server3"))
    found = house.collector("--tls-cert", issued[0], "--tls-key", issued[1], verify=loose)
    trusted = authority(tmp_path, "other") if case == "another authority" else ca
    options = () if case in ("nobody's", "plain") else ("--tls-ca", trusted.file)
    url = found.url.replace("https", "ws") if case == "plain" else wss(found)
    unknown = "nobody we trust signed its certificate: give the authority that did by --tls-ca"
    assert (
        said_by(house, url, *options)
        == {
            "another authority": unknown,
            "nobody's": unknown,
            "expired": "its certificate has expired: renew it",
            "another name": "its certificate is for another name: write the address in --collector as the certificate "
            "has it",
            "plain": "what answers there speaks no WebSocket; if it is a TLS port, write wss://",
        }[case]
        + "; the rings keep what they can"
    )


def test_tls_to_a_plain_port(house: House, ca: Authority) -> None:
    found = house.collector()
    why = said_by(house, found.url.replace("http", "wss"), "--tls-ca", ca.file)
    assert why.startswith("it speaks no TLS: write ws://, or give the collector --tls-cert")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_with_mutual_tls_nobody_gets_in_without_a_certificate(
    house: House, tmp_path: Path, ca: Authority, version: ssl.TLSVersion
) -> None:
    # GIVEN a collector that lets in whom one authority vouches for
    nodes = authority(tmp_path, "nodes")
    cert, key = nodes.issue("node")
    found = collector(house, ca, "--tls-client-ca", nodes.file, verify=trusting(ca, cert, key))
    context = trusting(ca)
    context.minimum_version = context.maximum_version = version
    # THEN health and all the rest are closed to the others
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{found.url}/healthz", verify=context)
    found.http.get("/healthz").raise_for_status()


def test_with_mutual_tls_a_sidecar_is_told_what_it_lacks(house: House, tmp_path: Path, ca: Authority) -> None:
    nodes = authority(tmp_path, "nodes")
    cert, key = nodes.issue("node")
    found = collector(house, ca, "--tls-client-ca", nodes.file, verify=trusting(ca, cert, key))
    trusted = ("--tls-ca", ca.file)
    why = said_by(house, wss(found), *trusted)
    assert why.startswith("it wants a certificate of ours: give one by --tls-client-cert")
    (house.ring_dir.parent / "sidecar.log").unlink()
    foreign = authority(tmp_path, "foreign").issue("stranger")
    why = said_by(
        house, wss(found), *trusted, "--tls-client-cert", foreign[0], "--tls-client-key", foreign[1]
    )
    assert why.startswith("it does not accept our certificate: compare --tls-client-cert")
    house.ring_dir.mkdir(mode=0o700)
    append_steps(RingWriter(house.ring_dir, identity(), 1 << 20), 5)
    house.ship(wss(found), found.token, *trusted, "--tls-client-cert", cert, "--tls-client-key", key)
    wait_until(lambda: found.last_step("life-1.0") == 5, "the evidence arrives")


def test_a_renewed_certificate_is_taken_up_without_a_restart_and_half_of_one_is_not(
    house: House, ca: Authority
) -> None:
    found = collector(house, ca)
    address = ("127.0.0.1", found.port)

    def shown() -> str:
        return ssl.get_server_certificate(address)

    before = shown()
    cert, key = house.directory / "server.pem", house.directory / "server.key"
    whole = cert.read_text()
    cert.write_text(whole[:40])
    assert shown() == before
    wait_until(lambda: "the certificate known before stays in use" in found.output, "it is told")
    ca.issue("server")
    assert shown() == cert.read_text() != before
    assert key.exists()
    assert found.http.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("readable", "can be read by others: chmod 600 it"),
        ("missing", "cannot be read: No such file or directory"),
        ("mismatch", "is not the key of --tls-cert"),
        ("rubbish", "and its key cannot be used: both must be PEM"),
        ("no cert", "--tls-key and --tls-client-ca need --tls-cert"),
        ("no ca", "holds no certificate in PEM"),
    ],
)
def test_files_that_cannot_be_used_are_refused_in_one_line(
    house: House, ca: Authority, case: str, said: str
) -> None:
    cert, key = ca.issue("server")
    options: list[str | Path] = ["--tls-cert", cert, "--tls-key", key]
    match case:
        case "readable":
            key.chmod(0o644)
        case "missing":
            key.unlink()
        case "mismatch":
            options[3] = ca.issue("other")[1]
        case "rubbish":
            cert.write_text("nothing")
        case "no cert":
            options = options[2:]
        case _:
            options += ["--tls-client-ca", key]
    process = house.process(
        BIN / "stagewatch", "collect", "--port", "0", "--data-dir", house.data_dir, *options
    )
    assert process.status() == 2
    assert process.output.count("\n") == 1
    assert said in process.output
    assert "PRIVATE KEY" not in process.output
