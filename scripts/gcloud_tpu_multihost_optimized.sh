#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The pod script of the optimized runs by its earlier name. It does what the other one does: both know every subcommand.
set -eu
exec "$(dirname "${BASH_SOURCE[0]}")/gcloud_tpu_multihost.sh" "$@"
