"""``python -m videokv.worldmodel``."""

from videokv.worldmodel.cli import app

if __name__ == "__main__":
    app(prog_name="videokv worldmodel")
