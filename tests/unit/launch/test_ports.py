"""Ports that are chosen long before they are listened on."""

import socket

import pytest

from megatron_rl.launch import ports, slurm


def test_no_connection_is_given_a_port_that_waits_for_its_listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        given = []
        for _ in range(50):
            with socket.create_connection(listener.getsockname()) as connection:
                given.append(connection.getsockname()[1])
    chosen = [ports.free_port("127.0.0.1") for _ in range(50)]
    assert max(chosen) < ports.first_of_connections() <= min(given)
    assert len(set(chosen)) > 40, "two runs seldom choose the same"


def test_ports_that_are_taken_are_passed_over(monkeypatch):
    monkeypatch.setattr(ports, "CHOICES", 2)
    with socket.create_server(("127.0.0.1", ports.free_port("127.0.0.1"))) as listener:
        taken = listener.getsockname()[1]
        monkeypatch.setattr(ports, "LOWEST", taken)
        monkeypatch.setattr(ports, "first_of_connections", lambda: taken + 2)
        assert {ports.free_port("127.0.0.1") for _ in range(5)} == {taken + 1}
        with socket.create_server(("127.0.0.1", taken + 1)), pytest.raises(RuntimeError, match="none of 2 ports"):
            ports.free_port("127.0.0.1")


def test_hosts_that_give_connections_all_ports_have_some_too(monkeypatch, tmp_path):
    (tmp_path / "range").write_text("1024\t65535\n")
    monkeypatch.setattr(ports, "RANGE", tmp_path / "range")
    assert ports.LOWEST <= ports.free_port("127.0.0.1") < 65_536


def test_ports_of_ranks_of_servers_and_of_their_nodes_are_different_ones():
    of_nodes = range(slurm.FIRST_SERVER_PORT, slurm.FIRST_SERVER_PORT + slurm.SERVER_PORTS * slurm.PORTS_OF_SERVER)
    of_ranks = range(slurm.FIRST_PORT, slurm.FIRST_PORT + slurm.PORTS)
    assert of_nodes.stop <= of_ranks.start and of_ranks.stop <= ports.LOWEST
