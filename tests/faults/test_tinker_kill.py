"""`palestra tinker` is killed while it saves: what it had acknowledged is whole, and a new server goes on from it."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tinker_server import made

tinker = pytest.importorskip("tinker")
types = tinker.types


@pytest.mark.slow("two servers take 20 s; make test-slow")
def test_a_server_that_is_killed_loses_nothing_that_it_acknowledged(tmp_path, monkeypatch):
    monkeypatch.setenv("PALESTRA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    row = types.Datum(
        model_input=types.ModelInput.from_ints([5, 6, 7]),
        loss_fn_inputs={"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]},
    )
    with serving(tmp_path) as (server, url):
        service = tinker.ServiceClient(base_url=url, api_key="tml-test")
        client = made(service.create_lora_training_client("palestra/tiny", rank=2))
        saved = []
        for step in range(3):
            client.forward_backward([row], "cross_entropy")
            client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
            saved.append(client.save_state(f"step-{step}").result().path)
        losses = [client.forward_backward([row], "cross_entropy").result().metrics["loss:sum"]]
        for step in range(3, 30):
            client.save_state(f"step-{step}")
        server.kill()
        service.holder.close()  # it would go on telling the server that it lives
    with serving(tmp_path) as (server, url):
        service = tinker.ServiceClient(base_url=url, api_key="tml-test")
        rest = tinker.RestClient(base_url=url, api_key="tml-test")
        found = rest.list_checkpoints(client.model_id).result().checkpoints
        assert {c.tinker_path for c in found} >= set(saved)
        for checkpoint in [found[0], found[-1]]:
            resumed = made(service.create_training_client_from_state_with_optimizer(checkpoint.tinker_path))
            losses.append(resumed.forward_backward([row], "cross_entropy").result().metrics["loss:sum"])
        service.close("success").result(10)
    assert losses[2] == losses[0]  # the last one that is whole has the weights of the third step
    assert losses[1] > losses[0]


@contextmanager
def serving(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "palestra", "tinker", "palestra/tiny", "--port", "0", "--device", "cpu"]
    with subprocess.Popen(
        [*command, "--output_dir", str(folder / "runs")], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            yield server, next(found.group() for line in server.stdout if (found := re.search(r"http://\S+", line)))
        finally:
            server.kill()
