# SPDX-License-Identifier: Apache-2.0
"""A run whose folder is in a bucket, against gcp-storage-emulator: a server with the API of Google's storage."""

import contextlib
import json
import logging
import os

import fsspec
import pytest
from gcp_storage_emulator import server as emulator
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects

from tests.test_train import arguments, command, finish

usual_download = objects.download


def download(request, response, storage, *rest, **more):
    """Answer as the emulator does, with the number of the content, which Google sends and TensorStore wants."""
    with contextlib.suppress(NotFound):
        found = storage.get_file_obj(request.params["bucket_name"], request.params["object_id"])
        response["x-goog-generation"] = found["generation"]
    return usual_download(request, response, storage, *rest, **more)


@pytest.fixture(scope="module")
def bucket():
    """The bucket gs://runs, as a file system."""
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulator.server.HTTPServer, "handle_error", lambda *unused: None)  # clients that hang up
        patch.setattr(emulator.server.HTTPServer, "request_queue_size", 64)
        patch.setattr(objects, "download", download)  # by which objects.get answers
        for _, methods in emulator.HANDLERS:
            if methods.get("GET") is usual_download:
                patch.setitem(methods, "GET", download)
        server = emulator.create_server("127.0.0.1", 0, in_memory=True)
        server.start()
        address = "http://127.0.0.1:{1}".format(*server._api._httpd.server_address)
        for name in ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"):  # gcsfs and epath; TensorStore
            patch.setenv(name, address)
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # asks Google's own servers
        patch.setenv("NO_GCE_CHECK", "true")  # asks the machine for an account
        files = fsspec.filesystem("gs", skip_instance_cache=True)
        type(files).clear_instance_cache()
        files.mkdir("runs")
        yield files
        server.stop()
        type(files).clear_instance_cache()


def test_a_run_in_a_bucket_goes_on_on_another_host_and_is_sampled_from(bucket, tmp_path):
    (tmp_path / "texts").mkdir()
    for index in range(20):
        (tmp_path / "texts" / f"{index}.txt").write_text(f"{index} and {index + 1} and so on; " * 60)
    for host, steps in (("one", 6), ("another", 9)):
        given = arguments(tmp_path, "unused", train__steps=steps)[1:]
        process = command("train.py", "--workdir=gs://runs/mine", *given, cache=tmp_path / host)
        status, out, err = finish(process)
        assert status == 0 and "checkpoint: gs://runs/mine/checkpoints/" in out, err
    lines = [json.loads(line) for line in bucket.cat("runs/mine/metrics.jsonl").splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, 10))
    stored = {name.rpartition("/")[2] for name in bucket.ls("runs/mine")}
    assert {"config.json", "summary.txt", "checkpoints", "logs", "tensorboard"} <= stored
    prompt = ["--workdir=gs://runs/mine", "--prompt=1 and ", "--max_tokens=4"]
    status, out, err = finish(command("generate.py", *prompt, cache=tmp_path / "third"))
    assert status == 0 and out.startswith("1 and "), err
    assert not os.path.exists("gs:")


def test_a_bucket_that_is_not_there_is_one_line(bucket, tmp_path):
    process = command("train.py", "--workdir=gs://nothing/mine", "--config.data.source=synthetic", cache=tmp_path)
    status, _, err = finish(process)
    assert status == 2
    assert err.strip().splitlines()[-1].startswith("error: --workdir=gs://nothing/mine: there is no such bucket")
