#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The earlier name of the pod script for optimized runs. It is the same as the other script.
set -eu
exec "$(dirname "${BASH_SOURCE[0]}")/gcloud_tpu_multihost.sh" "$@"
