# SPDX-License-Identifier: Apache-2.0
"""Downloads a model from Hugging Face's hub: only the files that an import reads or keeps.

They are in the hub's own cache (HF_HOME), which other programs share; an interrupted download resumes. For a gated
model the library reads HF_TOKEN or the login of `hf auth login`; this code never sees the token.
"""

import json
import pathlib
import sys

import httpx2
import huggingface_hub
from huggingface_hub import errors
from huggingface_hub.utils import disable_progress_bars

from configs.errors import ConfigError
from files.paths import expanded
from files.terminal import is_live
from migration.hugging_face import OTHER_FILES, WRITTEN

NOT_READ = ["*/*", "consolidated*"]  # other formats of the same weights


def folder_of(name: str) -> pathlib.Path:
    """Return a local folder of this name, or else a copy of the hub's model `org/name`.

    Raises:
      ConfigError: there is no such folder, and the hub has no such model, denies access, or does not answer.
    """
    folder = expanded(name)
    if folder.exists() or not _may_be_on_hub(name):
        return folder
    if not is_live(sys.stderr):
        disable_progress_bars()
    try:
        wanted = [*WRITTEN, *OTHER_FILES]
        folder = huggingface_hub.snapshot_download(name, allow_patterns=wanted, ignore_patterns=NOT_READ)
        return pathlib.Path(folder)
    except errors.GatedRepoError:
        why = "the hub's model is gated: request access on its page, then set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        why = "the hub has no such model, or it is private: check the name, or set HF_TOKEN"
    except errors.LocalEntryNotFoundError:
        why = "the hub does not answer, and its cache does not have the model; try again, or name a folder"
    except json.JSONDecodeError:
        why = "the answer is not the hub's; does a proxy ask for a login? Try again, or name a folder"
    except httpx2.TransportError as error:
        said = " ".join(str(error).split()) or type(error).__name__
        why = f"the download failed ({said}); run the command again, which resumes it"
    except (errors.HfHubHTTPError, OSError) as error:
        why = " ".join(str(error).split())
    raise ConfigError(f"--hf={name}: there is no such folder; {why}")


def _may_be_on_hub(name: str) -> bool:
    try:
        huggingface_hub.utils.validate_repo_id(name)
    except errors.HFValidationError:
        return False
    return name.count("/") == 1 and not name.startswith((".", "~"))
