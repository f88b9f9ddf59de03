# SPDX-License-Identifier: Apache-2.0
"""Write invented conversations and preferences, to try fine-tuning: python examples/conversations.py FOLDER

The user asks for the number after another. Half of the answers are polite; the preferred answer is the polite one.
"""

import argparse
import json
import pathlib
import random

COUNT = 3000  # conversations, and pairs


def main(folder: pathlib.Path) -> None:
    """Write FOLDER/talks.jsonl and FOLDER/pairs.jsonl."""
    rng = random.Random(0)
    with (folder / "talks.jsonl").open("w") as talks, (folder / "pairs.jsonl").open("w") as pairs:
        for _ in range(COUNT):
            number = rng.randrange(1000)
            question = {"role": "user", "content": f"What comes after {number}?"}
            short, polite = ({"role": "assistant", "content": f"{how}{number + 1}."} for how in ("", "Gladly: "))
            print(json.dumps({"messages": [question, rng.choice([short, polite])]}), file=talks)
            print(json.dumps({"prompt": [question], "chosen": [polite], "rejected": [short]}), file=pairs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path, metavar="FOLDER")
    target = parser.parse_args().folder
    try:
        target.mkdir(parents=True, exist_ok=True)
        main(target)
    except OSError as error:
        parser.error(f"{target}: {error.strerror}; name a folder that can be written")
