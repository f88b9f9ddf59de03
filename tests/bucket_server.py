# SPDX-License-Identifier: Apache-2.0
"""gcp-storage-emulator, a server with the API of Google's storage, and the parts of the API that it lacks."""

import contextlib
import logging
from http import HTTPStatus

import fsspec
import pytest
from gcp_storage_emulator import server as emulator
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects


def download(request, response, storage, *rest, **more):
    """Answer as the emulator does, and add the generation of the object, which Google sends and TensorStore needs."""
    response["x-goog-generation"] = generation(request, storage)
    return objects_download(request, response, storage, *rest, **more)


def generation(request, storage) -> str:
    """Return the generation of the object that a request is about; 0 if there is no such object."""
    name = request.params.get("object_id") or request.query.get("name", [None])[0] or request.data["meta"]["name"]
    with contextlib.suppress(NotFound):
        return storage.get_file_obj(request.params["bucket_name"], name)["generation"]
    return "0"


def checked(usual, parameter: str, status: HTTPStatus):
    """Refuse a request for another generation than the object has, as Google does and the emulator does not."""

    def answer(request, response, storage, *rest, **more):
        (wanted,) = request.query.get(parameter, [None])
        if wanted and wanted != generation(request, storage):
            response.status = status
            return
        usual(request, response, storage, *rest, **more)

    return answer


objects_download = objects.download
REPLACED = {
    objects.get: checked(objects.get, "generation", HTTPStatus.NOT_FOUND),
    objects.download: checked(download, "generation", HTTPStatus.NOT_FOUND),
    objects.insert: checked(objects.insert, "ifGenerationMatch", HTTPStatus.PRECONDITION_FAILED),
    objects.compose: checked(objects.compose, "ifGenerationMatch", HTTPStatus.PRECONDITION_FAILED),
    objects.delete: checked(objects.delete, "ifGenerationMatch", HTTPStatus.PRECONDITION_FAILED),
}


@contextlib.contextmanager
def empty_bucket():
    """Serve the bucket gs://runs to this process and its children during the block; yield a file system."""
    with served_bucket() as (files, _):
        yield files


@contextlib.contextmanager
def served_bucket():
    """Serve it; yield the file system, and the server's own record of each object by its name."""
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulator.server.HTTPServer, "handle_error", lambda *unused: None)  # clients that hang up
        patch.setattr(emulator.server.HTTPServer, "request_queue_size", 64)
        patch.setattr(objects, "download", download)  # by which objects.get answers
        for methods in [methods for _, methods in emulator.HANDLERS]:
            for method, usual in methods.items():
                patch.setitem(methods, method, REPLACED.get(usual, usual))
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
        yield files, server._storage.objects.setdefault("runs", {})
        server.stop()
        type(files).clear_instance_cache()
