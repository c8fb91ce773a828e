"""Two hosts on one machine: two network namespaces and a cable between them, which may be cut."""
import subprocess
import uuid


def ip(*args):
    subprocess.run(["ip", *args], check=True, capture_output=True)


class Cable:
    """The hosts have the addresses NETWORK.1 and NETWORK.2. Where they cannot be made it raises an
    OSError or a subprocess.CalledProcessError and leaves nothing behind."""

    def __init__(self, network):
        tag = uuid.uuid4().hex[:6]
        self.spaces = [f"ls{tag}a", f"ls{tag}b"]
        self.links = [f"v{tag}a", f"v{tag}b"]
        try:
            for space in self.spaces:
                ip("netns", "add", space)
            ip("link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
            for index, (space, link) in enumerate(zip(self.spaces, self.links)):
                ip("link", "set", link, "netns", space)
                ip("-n", space, "addr", "add", f"{network}.{index + 1}/24", "dev", link)
                ip("-n", space, "link", "set", link, "up")
                ip("-n", space, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError):
            self.remove()
            raise

    def inside(self, host):
        """What a command on that host, 0 or 1, begins with."""
        return ("ip", "netns", "exec", self.spaces[host])

    def set_link(self, host, state):
        """`down` or `up`, at that host's end."""
        ip("-n", self.spaces[host], "link", "set", self.links[host], state)

    def remove(self):
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
