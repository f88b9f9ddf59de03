# SPDX-License-Identifier: Apache-2.0
"""What the earlier systems promised of a step, and of `setup`, where no other test shows it."""

import contextlib
import logging
import re

import jax
import numpy as np
import pytest
from jax.extend import core

import train
from core import assembly
from core.callbacks import Callback
from pods import deploy, life, settings
from pods.transports import Result
from reporting import preflight
from tests.test_train import in_process, own_batches


def products(jaxpr):
    """Yield every matrix product of a program, inside its loops and functions too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from products(inner)


SUMMED_IN_FLOAT32 = {"BTKGH,BSKH->BKGTS", "BTD,DV->BTV", "BTD,BTV->DV"}  # scores, logits, gradient of the head


def test_products_are_in_bfloat16_and_all_that_is_kept_is_float32():
    """Every product of weights and activations, forward and backward; only scores and logits are float32."""
    config = in_process(model__dtype="bfloat16", model__remat="attention")
    run = assembly.assemble(config)
    kept = jax.tree.leaves((run.abstract_state.params, run.abstract_state.optimizer))
    assert {leaf.dtype for leaf in kept} <= {np.dtype(np.float32), np.dtype(np.int32)}
    with assembly.mesh_context(run.mesh):
        jaxpr = jax.make_jaxpr(run.train_step)(run.abstract_state, run.abstract_batch)
    names = {"bfloat16": set(), "float32": set()}
    for product in products(jaxpr.jaxpr):
        (dtype,) = {str(operand.aval.dtype) for operand in product.invars}
        names[dtype].add(re.search(r"[A-Z]+,[A-Z]+->[A-Z]+", str(product.source_info.name_stack))[0])
    assert names["float32"] == SUMMED_IN_FLOAT32
    assert names["bfloat16"] == {
        "BTD,DNH->BTNH", "BTD,DKH->BTKH", "BTNH,NHD->BTD", "BKGTS,BSKH->BTKGH", "BTD,DF->BTF", "BTF,FD->BTD",
        "BTV,DV->BTD",
    }  # fmt: skip


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """Four steps in which nothing may move unasked between host and devices: (messages of jax, steps taken).

    The guard holds from the call of the first step until the last one was logged and the callbacks were asked.
    """
    compile_step, messages, taken, guard = assembly.Run.compile, [], [], contextlib.ExitStack()

    class Ends(Callback):
        def on_step(self, job, state, step):
            if step == 4:
                guard.close()

    def guarded(run):
        step = compile_step(run)

        def call(state, batch, frozen):
            taken.append(len(taken) + 1)
            if len(taken) == 1:
                guard.enter_context(jax.transfer_guard("disallow"))
            return step(state, batch, frozen)

        return call

    listener = logging.Handler()
    listener.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("jax").addHandler(listener)
    config = in_process(train__steps=4, train__eval_every=0)
    before = jax.config.jax_log_compiles
    jax.config.update("jax_log_compiles", True)  # jax.log_compiles() would not hold in the thread that compiles
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly.Run, "compile", guarded)
        patch.setattr(preflight, "report", lambda *unused: [])
        train.train(config, tmp_path_factory.mktemp("watched"), own_batches(config, 4), callbacks=[Ends()])
    logging.getLogger("jax").removeHandler(listener)
    jax.config.update("jax_log_compiles", before)
    return messages, taken


def test_a_run_compiles_its_step_once(watched):
    compiled = [text for text in watched[0] if text.startswith("Finished XLA compilation of jit(train_step)")]
    assert len(compiled) == 1


def test_a_save_of_small_arrays_compiles_no_program_to_cut_them(watched):
    assert not [text for text in watched[0] if text.startswith("Finished XLA compilation of jit(slice)")]


def test_a_step_moves_nothing_between_host_and_devices(watched):
    """Nor does the loop between steps, but a batch ahead and the numbers of a step, which are asked for."""
    assert watched[1] == [1, 2, 3, 4]


def test_setup_ends_with_the_deployment(monkeypatch):
    """Its own test shows what that does."""
    done = []

    class Transport:
        def put_code(self):
            done.append("code")

        def run(self, command, **options):
            done.append("devices")
            return [Result(0, 0, "")]

    for name in life.SECRETS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(deploy, "setup_optimizations", lambda *unused: done.append("deployment"))
    asked, _ = settings.read(["--zone=z", "--project=p"], {})
    life.setup(asked, Transport(), [])
    assert done == ["code", "devices", "deployment"]
