"""``python -m videokv.worldmodel``."""

from videokv.stopping import quiet_interrupt

if __name__ == "__main__":
    with quiet_interrupt():
        from videokv.worldmodel.cli import app
    app(prog_name="videokv worldmodel")
