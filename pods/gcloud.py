# SPDX-License-Identifier: Apache-2.0
"""The transport for a pod of TPU VMs: https://cloud.google.com/sdk/gcloud/reference/compute/tpus

With several slices the pod is a queued resource with the nodes NAME-0, NAME-1, ... Its workers are numbered across all
nodes.
"""

import contextlib
import dataclasses
import functools
import pathlib
import re
import secrets
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import pydantic

from files.json_reader import JsonError, Object, parse_json
from pods import calls, hosts, recipes, records
from pods.calls import call, note
from pods.errors import PodError, usage_error
from pods.settings import Settings, check_worker, worker_numbers
from pods.transports import Deletion, Result, expect_success

QUEUED_AND_LOST = ("FAILED", "SUSPENDING", "SUSPENDED", "DELETING")  # such a request never becomes active
NODE_AND_LOST = ("PREEMPTED", "TERMINATED", "STOPPED", "STOPPING", "DELETING", "HIDDEN", "HIDING", "UNKNOWN")
NODE_AND_REPAIRED = ("CREATING", "STARTING", "RESTARTING", "REIMAGING", "REPAIRING", "UNHIDING")  # READY afterwards
HEALTHY = ("HEALTHY", "HEALTH_UNSPECIFIED")
SHELL_TEXT = re.compile(r"[$`;&|<>()\\\"'!\n\r]")
OPTIONS = (  # settings that become flags of gcloud's create
    "spot", "reserved", "network", "subnetwork", "internal_ips", "service_account", "scopes", "labels", "metadata",
    "tags", "data_disk",
)  # fmt: skip
# Without these, a lost connection stays silent for hours.
SSH_FLAGS = ("-oConnectTimeout=10", "-oServerAliveInterval=15", "-oServerAliveCountMax=4")
LOOKS_AT_ONCE = 32  # processes of gcloud
Word = Annotated[str, pydantic.Field(pattern="^[A-Za-z0-9_ ./-]{0,200}$")]  # no control sequence of a terminal
RUN_SECRET = "torus-run-secret"  # metadata of every host, with which the processes of a run authenticate


class Endpoint(Object, total=False):
    """The address of a host."""

    ipAddress: Annotated[str, pydantic.Field(pattern="^[0-9A-Za-z.:-]*$")]


class Node(Object, total=False):
    """The keys that are read from gcloud's description of a node."""

    state: Word
    health: Word
    acceleratorType: Word
    createTime: Annotated[str, pydantic.Field(pattern="^[0-9A-Za-z:.+-]{0,50}$")]
    networkEndpoints: list[Endpoint]
    queuedResource: Annotated[str, pydantic.Field(pattern="^(.*/)?[a-z0-9][a-z0-9-]*$")]
    metadata: dict[str, object]


class Gcloud:
    """The transport `gcloud`.

    Every method may raise a PodError, with gcloud's own message in one line. A PodError without a zone or a project has
    status 2.
    """

    def __init__(self, settings: Settings):
        if missing := [name for name in ("zone", "project") if not getattr(settings, name)]:
            variables, are = " and ".join(name.upper() for name in missing), "is" if len(missing) == 1 else "are"
            exports, flags = (" ".join(f"{form(name)}=..." for name in missing) for form in (str.upper, "--{}".format))
            raise usage_error(f"{variables} {are} not set: export {exports} or give {flags}")
        self.settings = settings
        self.scope = [f"--zone={settings.zone}", f"--project={settings.project}"]
        self.nodes = [settings.name]
        if settings.slices > 1:
            self.nodes = [f"{settings.name}-{i}" for i in range(settings.slices)]

    @functools.cached_property
    def num_workers(self) -> int:
        """The number of hosts of the existing pod; in a dry run, of its accelerator type."""
        workers = self.found()["workers"]
        if not workers:
            raise PodError(f"{self.settings.name} has no hosts yet; `wait` for it")
        return workers

    def versions(self) -> None:
        """Display the software versions and the accelerator types of the zone."""
        for kind in ("versions", "accelerator-types"):
            self._gcloud(["tpu-vm", kind, "list", *self.scope], show=True)

    def create(self) -> str:
        settings = self.settings
        if not settings.version:
            raise usage_error("VERSION is empty; `versions` lists the versions of the zone")
        if settings.queued:
            nodes = [f"--node-id={settings.name}"]
            if settings.slices > 1:
                nodes = [f"--node-count={settings.slices}", f"--node-prefix={settings.name}"]
            words = ["queued-resources", "create", settings.request, *nodes, *self.scope, *self._accelerator()]
            words += [f"--runtime-version={settings.version}", *self._flags(*OPTIONS, "valid_until_duration")]
        else:
            words = ["tpu-vm", "create", settings.name, *self.scope, *self._accelerator()]
            words += [f"--version={settings.version}", *self._flags(*OPTIONS)]
        try:
            with _new_secret(settings) as file:
                self._gcloud([*words, f"--metadata-from-file={RUN_SECRET}={file}"])
        except _Exists:
            return f"{settings.name} exists already"
        asked = f"request {settings.request} is queued; `wait` for it" if settings.queued else "created"
        return f"{settings.name}: {asked}"

    def wait(self) -> str:
        """Wait for the pod; PodError if it can never become ready, or is not ready within wait_seconds."""
        end, printed = time.monotonic() + self.settings.wait_seconds, ""
        while True:
            state, lost = self._state()
            if state in ("ACTIVE", "READY"):
                return f"{self.settings.name} is {state}"
            if state in lost:
                delete = "delete --queued" if self.settings.queued else "delete"
                raise PodError(f"{self.settings.name} is {state} and cannot become ready; `{delete}` it, then `create`")
            if time.monotonic() > end:
                raise PodError(f"{self.settings.name} is still {state} after {self.settings.wait_seconds:.0f} s")
            if state != printed:
                print(f"{self.settings.name} is {state}; waiting", flush=True)
                printed = state
            time.sleep(self.settings.poll_seconds)

    def describe(self) -> dict | None:
        try:
            return self.found()
        except _Missing:
            return None

    def found(self) -> dict:
        nodes = [self._describe(node) for node in self.nodes]
        if self.settings.dry_run:
            return self._imagined()
        sizes = [len(node.get("networkEndpoints", [])) for node in nodes]  # 0 while a slice is made
        endpoints = [endpoint for node in nodes for endpoint in node.get("networkEndpoints", [])]
        created = {"createTime": nodes[0]["createTime"]} if "createTime" in nodes[0] else {}
        return min(nodes, key=_rank) | created | {"networkEndpoints": endpoints, "workers": max(sizes) * len(nodes)}

    def exists(self) -> bool:
        """Return whether there is a pod or a queued resource of this name, in any state."""
        try:
            return self.describe() is not None or bool(self.settings.queued and self._request_state())
        except _Missing:
            return False

    def delete(self) -> Deletion:
        """Delete the pod and the queued resource that it came from."""
        settings = self.settings
        request = settings.request if settings.queued else ""
        try:
            request = request or self.found().get("queuedResource", "").rpartition("/")[2]
            if request:
                self._gcloud(["queued-resources", "delete", request, *self.scope, "--force", "--quiet"])
            else:
                self._gcloud(["tpu-vm", "delete", settings.name, *self.scope, "--quiet"])
        except _Missing:
            hint = "" if request else " (--queued deletes a request that still waits)"
            line = f"{request or settings.name} does not exist; nothing to delete{hint}"
            return Deletion(line, existed=False)
        return Deletion(f"{settings.name}: deleted")

    def put_code(self) -> None:
        """Clone or fetch the current commit and install its packages; a URL with a password is refused."""
        settings = self.settings
        url = settings.repo_url or records.git("remote", "get-url", "origin").stdout.strip()
        if not url:
            raise usage_error("REPO_URL is not set, and this clone has no origin; set it to a URL that hosts can clone")
        if re.match(r"https?://[^/]*@", url):
            raise usage_error("REPO_URL contains a password, which everybody on the hosts could read; leave it out")
        commit, changed = records.code_state()
        if not commit:
            raise usage_error(f"{records.ROOT} is not a git clone with a commit, which the hosts would check out")
        if changed:
            note(settings, "warning: the hosts get the commit without the uncommitted changes of this clone")
        expect_success(self.run(hosts.setup(settings, url, commit)), "set up the code")

    def run(
        self, command: str, *, worker: str = "all", show: bool = True, output_directory: str = "",
        together: bool = True, limit_s: float | None = None,
    ) -> list[Result]:  # fmt: skip
        """Run a command with one ssh call for each node; for some workers, or for their files, one for each worker.

        gcloud loses the status of some workers if there are several, and its own --output-directory opens
        None/WORKER.log.
        """

        def ssh(target: tuple[str, str, int]) -> Result:
            node, chosen, first = target
            numbered = f"{hosts.FIRST_WORKER}={first}; {command}" if first else command
            words = ["tpu-vm", "ssh", node, *self.scope, f"--worker={chosen}", f"--command={numbered}"]
            words += [f"--ssh-flag={flag}" for flag in SSH_FLAGS]
            result = self._call(words, show=show, remote=True, limit_s=limit_s)
            if chosen.isdigit():
                result = dataclasses.replace(result, worker=first + int(chosen))
            if output_directory and not self.settings.dry_run:
                pathlib.Path(output_directory, f"{result.worker}.log").write_text(result.output)
            return result

        return self._side_by_side(ssh, self._targets(worker, each=bool(output_directory)), together)

    def run_each(self, command: str, *, together: bool = False, limit_s: float | None = None) -> list[Result]:
        def on_one(index: int) -> Result:
            return self.run(command, worker=str(index), show=False, limit_s=limit_s)[0]

        return self._side_by_side(on_one, range(self.num_workers), together)

    def copy(self, source: str, target: str, *, worker: str = "all", recurse: bool = True) -> None:
        """Copy with scp; for a copy from a worker, `worker` is one number.

        A path on a worker may be a glob. Old versions of scp pass it to a shell, so it may contain no other shell
        syntax.
        """
        for text in (source, target):
            if text.startswith(f"{self.settings.name}:") and (found := SHELL_TEXT.search(text)):
                raise usage_error(f"{text}: scp may pass this path to a shell on the host; remove {found[0]!r} from it")
        for node, chosen, _ in self._targets(worker):
            pair = [re.sub(f"^{self.settings.name}:", f"{node}:", text) for text in (source, target)]
            words = ["tpu-vm", "scp", *pair, *self.scope, f"--worker={chosen}", *(["--recurse"] if recurse else [])]
            self._gcloud([*words, *(f"--scp-flag={flag}" for flag in SSH_FLAGS)], remote=True)

    def _describe(self, node: str) -> dict:
        text = self._gcloud(["tpu-vm", "describe", node, *self.scope, "--format=json"]).output
        if self.settings.dry_run:
            return {}
        try:
            described = parse_json(text, Node, "it")
        except JsonError as error:
            what = "gcloud compute tpus tpu-vm describe: the output is not a JSON description of a node"
            raise PodError(f"{what} ({error}): {text[:100]!r}") from None
        described.get("metadata", {}).pop(RUN_SECRET, None)  # `pod.py describe --json` prints the whole description
        return described

    def _imagined(self) -> dict:
        """Return the description of a pod for a dry run, where every host exists."""
        topology = recipes.preset(self.settings)
        workers = topology.hosts if topology else self.settings.slices
        note(self.settings, f"dry run: assumes a READY pod with {workers} workers")
        endpoints = [{"ipAddress": f"10.0.0.{i + 2}"} for i in range(workers)]
        described = {"state": "READY", "health": "HEALTHY", "acceleratorType": self.settings.accel}
        return described | {"networkEndpoints": endpoints, "workers": workers}

    def _state(self) -> tuple[str, tuple[str, ...]]:
        """Return the state of the request or the pod, and the states from which it never becomes usable."""
        if not self.settings.queued:
            return self.found().get("state", "STATE_UNSPECIFIED"), NODE_AND_LOST
        state = self._request_state()
        return "ACTIVE" if self.settings.dry_run else state, QUEUED_AND_LOST

    def _request_state(self) -> str:
        words = ["queued-resources", "describe", self.settings.request, *self.scope, "--format=value(state.state)"]
        return self._gcloud(words).output.strip()

    def _accelerator(self) -> list[str]:
        if self.settings.type:
            return self._flags("type", "topology")
        return [f"--accelerator-type={self.settings.accel.replace(recipes.V5E, recipes.V5E_AT_GOOGLE)}"]

    def _flags(self, *names: str) -> list[str]:
        """Return gcloud's flags for those of the named settings that are given."""
        words = []
        for name in names:
            value, flag = getattr(self.settings, name), "--" + name.replace("_", "-")
            words += [flag] if value is True else [f"{flag}={value}"] if value else []
        return words

    def _targets(self, worker: str, *, each: bool = False) -> list[tuple[str, str, int]]:
        """Return (node, its workers in gcloud's syntax, number of its first worker) of each call for --worker."""
        check_worker(worker)
        if len(self.nodes) == 1 and (worker.isdigit() or (worker == "all" and not each)):
            return [(self.nodes[0], worker, 0)]
        if worker == "all" and not each:
            size = self._slice_size()
            return [(node, worker, index * size) for index, node in enumerate(self.nodes)]
        size = self.num_workers // len(self.nodes)
        chosen = [divmod(number, size) for number in worker_numbers(worker, self.num_workers)]
        return [(self.nodes[node], str(index), node * size) for node, index in chosen]

    def _slice_size(self) -> int:
        """Return the number of hosts of a slice; if a node is missing, ask one that exists, so that it is reached."""
        try:
            return self.num_workers // len(self.nodes)
        except _Missing:
            sizes = (len(self._if_there(node).get("networkEndpoints", [])) for node in self.nodes)
            if not (size := next(filter(None, sizes), 0)):
                raise
            return size

    def _if_there(self, node: str) -> dict:
        """Describe a node; {} if it does not exist."""
        try:
            return self._describe(node)
        except _Missing:
            return {}

    def _side_by_side(self, function, targets, together: bool) -> list[Result]:
        """Return the results of `function` for all targets, all or LOOKS_AT_ONCE at once; in a dry run in order."""
        targets = list(targets)
        if len(targets) == 1:  # in this thread, because it receives Ctrl-C
            return [function(targets[0])]
        at_once = 1 if self.settings.dry_run else len(targets) if together else LOOKS_AT_ONCE
        with ThreadPoolExecutor(at_once) as pool:
            try:
                return list(pool.map(function, targets))
            except KeyboardInterrupt:
                with calls.ended():
                    pool.shutdown(cancel_futures=True)
                raise

    def _call(self, words: list[str], **options) -> Result:
        return call(self.settings, ["gcloud", "compute", "tpus", *words], **options)

    def _gcloud(self, words: list[str], **options) -> Result:
        """Call gcloud; PodError if the call fails."""
        result = self._call(words, **options)
        if result.status:
            kinds = [kind for kind in (_Missing, _Exists) if kind.SAID.search(result.message)]
            verb = " ".join(words[: 3 if words[2] == "list" else 2])
            raise (kinds or [PodError])[0](f"gcloud compute tpus {verb}: {result.message}")
        return result


def _rank(node: dict) -> tuple[bool, bool, bool]:
    """Return a sort key that puts a lost node first, then one that is not READY, then an unhealthy one."""
    state, is_healthy = node.get("state"), node.get("health", HEALTHY[0]) in HEALTHY
    return state not in NODE_AND_LOST, state == "READY", is_healthy


class _Missing(PodError):
    """The node or request does not exist."""

    SAID = re.compile(r"not[_ ](?:be )?found", re.IGNORECASE)


class _Exists(PodError):
    """The node or request exists already."""

    SAID = re.compile(r"already[_ ]exists?", re.IGNORECASE)


@contextlib.contextmanager
def _new_secret(settings: Settings) -> Iterator[pathlib.Path]:
    """Yield the path of a file with a new secret; only this user can read it, and it is deleted after the block."""
    if settings.dry_run:
        yield pathlib.Path("/tmp/private", RUN_SECRET)
        return
    with tempfile.TemporaryDirectory() as folder:  # the folder has mode 700
        file = pathlib.Path(folder, RUN_SECRET)
        file.touch(mode=0o600)
        file.write_text(secrets.token_hex(32))
        yield file


def storage(settings: Settings, words: list[str]) -> Result:
    """Call `gcloud storage` with these words, such as ["ls", "gs://bucket"]; the caller checks the status."""
    return call(settings, ["gcloud", "storage", *words])
