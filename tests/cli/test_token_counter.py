"""The tokenizer of ``verl-padding plan``, where the hub is out of reach."""

import socket
import threading
import time
from importlib import import_module

import pytest
from huggingface_hub import constants

from verl_padding.cli.token_counter import token_counter
from verl_padding.errors import PaddingDataError
from verl_padding.local.tiny_models import make_tiny_model


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Requests, by their first lines, to a hub that never answers those for the model; the cache is empty."""
    requests, connections = [], []
    with socket.create_server(("127.0.0.1", 0)) as hub:

        def listen():
            while True:
                try:
                    connection, _ = hub.accept()
                except OSError:
                    return
                connections.append(connection)
                requests.append(connection.makefile().readline())
                if "some/name" not in requests[-1]:
                    connection.shutdown(socket.SHUT_RDWR)

        threading.Thread(target=listen, daemon=True).start()
        endpoint = f"http://127.0.0.1:{hub.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr("verl_padding.cli.token_counter.SECONDS", 0.5)
        yield requests
        hub.shutdown(socket.SHUT_RDWR)
    for connection in connections:
        connection.close()


def test_a_hub_that_does_not_answer_is_asked_once_and_refused_in_a_line(asked, caplog):
    import_module("transformers")  # which takes its own time
    started = time.monotonic()
    with pytest.raises(PaddingDataError) as refused:
        token_counter("some/name")
    assert time.monotonic() - started < 20, "transformers asks for a minute"
    # The hub's client may ask for lists of its own.
    assert len([request for request in asked if "some/name" in request]) == 1
    assert str(refused.value).startswith("--tokenizer some/name: cannot be read (")
    assert "\n" not in str(refused.value)
    assert "Retrying" not in caplog.text


def test_a_folder_needs_no_hub(asked, tmp_path):
    count = token_counter(str(make_tiny_model("qwen2", tmp_path)))
    assert count is not None
    assert count("four") == 4
    assert not asked
