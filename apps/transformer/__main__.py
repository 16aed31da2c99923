"""``python -m apps.transformer CONFIG ...`` is ``meshmpi train CONFIG ...``; see configs/.

``python -m apps.transformer translate ...``: see `apps.transformer.translate`.
"""

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["translate"]:
        from apps.transformer import translate

        raise SystemExit(translate.main(sys.argv[2:]))
    from meshmpi.cli import main

    raise SystemExit(main(["train", *sys.argv[1:]]))
