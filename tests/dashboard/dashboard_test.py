"""The dashboard's server, request by request: who gets in, what is refused, what it survives."""

import concurrent.futures
import contextlib
import json
import socket
import subprocess
import time
import unittest

from dashboard_case import BOUND_S, Events, DashboardCase, PEER, parse, read_to_end, state

PAGES = ("/", "/page.css", "/charts.js", "/page.js", "/icon.svg")
PRIVATE = (*PAGES, "/snapshot", "/events", "/metrics", "/nothing")


class Access(DashboardCase):
    def setUp(self):
        self.server = self.serve()

    def status(self, path, **options):
        return self.server.request(path, **options)[0]

    def test_the_printed_address_opens_the_page_and_leaves_a_cookie(self):
        self.assertRegex(self.server.url, r"^http://127\.0\.0\.1:\d+/\?token=[0-9a-f]{32}$")
        path = self.server.url.split(str(self.server.port), 1)[1]
        status, headers, body = self.server.request(path, token=False)
        self.assertEqual(status, 200)
        self.assertIn(b"<title>Lockstep</title>", body)
        cookie, *attributes = headers["set-cookie"].split("; ")
        self.assertEqual(sorted(attributes), ["HttpOnly", "Path=/", "SameSite=Strict"])
        for page in (*PAGES, "/snapshot", "/metrics"):
            self.assertEqual(self.status(page, token=False, headers=[f"Cookie: {cookie}"]), 200)

    def test_without_the_token_there_are_only_the_probes(self):
        wrong = self.server.token[:-1] + ("0" if self.server.token[-1] != "0" else "1")
        for path in PRIVATE:
            for query, headers in (
                    ("", []), (f"?token={wrong}", []), ("?token=", []), (f"?token={wrong}00", []),
                    ("", [f"Authorization: Bearer {wrong}"]), ("", ["Authorization: Bearer "]),
                    ("", [f"Authorization: Basic {self.server.token}"]),
                    ("", [f"Cookie: lockstep_{self.server.port}={wrong}"]),
                    # The query decides: a stale address does not work because of a cookie.
                    (f"?token={wrong}", [f"Cookie: lockstep_{self.server.port}="
                                         f"{self.server.token}"])):
                with self.subTest(path=path, query=query, headers=headers):
                    status, _, body = self.server.request(path + query, token=False,
                                                          headers=headers)
                    self.assertEqual(status, 403)
                    self.assertNotIn(self.server.token.encode(), body)
        self.assertEqual(self.status("/healthz", token=False), 200)
        self.assertEqual(self.status("/readyz", token=False), 200)

    def test_a_foreign_host_is_refused(self):
        port = self.server.port
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "10.0.0.1",
                     "localhost.evil.example", "[fe80::1]", "localhost:port", "[::1", "@localhost",
                     "127.0.0.1:99999999", "evil.example#localhost"):
            for path in ("/", "/healthz", "/events"):
                with self.subTest(host=host, path=path):
                    self.assertEqual(self.status(path, host=host), 421)
        # A tunnel (ssh -L) has another port.
        for host in ("localhost", "LocalHost:9000", "127.0.0.1", "127.8.8.8:1", f"[::1]:{port}"):
            with self.subTest(host=host):
                self.assertEqual(self.status("/", host=host), 200)

    def test_one_host_is_needed(self):
        token = f"Authorization: Bearer {self.server.token}\r\n"
        for head in ("GET / HTTP/1.0\r\n" + token, "GET / HTTP/1.1\r\n" + token,
                     "GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n" + token):
            self.assertEqual(self.server.raw((head + "\r\n").encode())[0], 400, head)

    def test_only_get_and_head(self):
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"):
            for path in ("/", "/snapshot", "/healthz"):
                status, headers, body = self.server.request(
                    path, method=method, headers=["Content-Length: 3"], body=b"a=b")
                self.assertEqual(status, 405, method)
                self.assertEqual(headers["allow"], "GET, HEAD")
        for path in (*PAGES, "/snapshot", "/metrics", "/events", "/healthz"):
            status, headers, body = self.server.request(path, method="HEAD")
            self.assertEqual((status, body), (200, b""), path)
            if path != "/events":
                whole = self.server.request(path)
                self.assertEqual(headers["content-length"], whole[1]["content-length"])

    def test_paths_are_names_and_not_files(self):
        for path in ("/../../../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd",
                     "/page.js/../../../etc/passwd", "/..%2fpage.js",
                     "/PAGE.JS", "/index.html", "/.git/config", "/" + "a" * 2000):
            status, _, body = self.server.request(path)
            self.assertIn(status, (404, 400), path)
            self.assertNotIn(b"root:", body)

    def test_every_answer_has_the_headers_of_a_page_that_trusts_nobody(self):
        for path in (*PAGES, "/snapshot", "/metrics", "/healthz", "/nothing"):
            _, headers, _ = self.server.request(path)
            policy = headers["content-security-policy"]
            self.assertTrue(policy.startswith("default-src 'none'; script-src 'self'; "), policy)
            self.assertNotIn("unsafe", policy)
            self.assertNotIn("http", policy)
            self.assertEqual(headers["x-content-type-options"], "nosniff")
            self.assertEqual(headers["cache-control"], "no-store")
            self.assertEqual(headers["referrer-policy"], "no-referrer")
            self.assertEqual(headers["x-frame-options"], "DENY")
            self.assertNotIn("access-control-allow-origin", headers)

    def test_the_page_names_nothing_from_elsewhere(self):
        for path in PAGES:
            text = self.server.request(path)[2].decode()
            text = text.replace("http://www.w3.org/2000/svg", "")  # a name, never fetched
            self.assertNotRegex(text, r"https?:|//[a-z]+\.", path)
            self.assertNotRegex(text, r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(")


class Contents(DashboardCase):
    def setUp(self):
        self.server = self.serve()

    def test_snapshot_metrics_and_probes(self):
        value = state(7)
        self.server.set(value)
        self.eventually(lambda: json.loads(self.server.request("/snapshot")[2]) == value, "state")
        status, headers, body = self.server.request("/metrics")
        self.assertEqual(headers["content-type"], "text/plain; version=0.0.4; charset=utf-8")
        self.assertIn(b"lockstep_step 7\n", body)
        self.assertEqual(self.server.request("/readyz")[0], 200)
        self.server.set(state(run_state="starting"))
        self.eventually(lambda: self.server.request("/readyz")[0] == 503, "not ready")
        self.assertEqual(self.server.request("/healthz")[0], 200)

    def test_events_follow_the_run_to_its_end(self):
        events = Events(self.server)
        self.assertEqual(events.status, 200)
        self.assertTrue(events.headers["content-type"].startswith("text/event-stream"))
        for step in (300, 301, 302):
            self.server.set(state(step))
            while events.next()[1]["ranks"][0]["step"] != step:
                pass
        last = state(303, run_state="ended")
        self.server.set(last)
        time.sleep(0.1)
        self.assertEqual(self.server.close(), 0)
        received = []
        while event := events.next():
            received.append(event)
        self.assertEqual(received[-1][0], "end")
        self.assertEqual([e for e in received if e[0] == "message"][-1][1], last)
        events.close()

    def test_text_with_line_breaks_stays_one_event(self):
        hostile = state(log={"0": ["\n\ndata: {\"fake\": 1}\n\n", "</script>\r\n\r\nevent: end"]})
        self.server.set(hostile)
        events = Events(self.server)
        self.eventually(lambda: events.next() == ("message", hostile), "as it was sent")
        events.close()

    def test_a_source_that_fails_is_an_error_and_not_the_end(self):
        self.server.set("throw")
        self.eventually(lambda: self.server.request("/snapshot")[0] == 500, "status 500")
        self.assertIn(b"there is no state", self.server.request("/snapshot")[2])
        self.server.set(state(11))
        self.eventually(lambda: self.server.request("/snapshot")[0] == 200, "again")


class Load(DashboardCase):
    def test_fifty_viewers_at_once(self):
        server = self.serve("", 200, 30_000)
        viewers = [Events(server) for _ in range(50)]
        server.set(state(500))
        for viewer in viewers:
            while viewer.next()[1]["ranks"][0]["step"] != 500:
                pass
        with concurrent.futures.ThreadPoolExecutor(50) as pool:
            answers = list(pool.map(lambda _: server.request("/snapshot")[0], range(200)))
        self.assertEqual(set(answers), {200})
        for viewer in viewers:
            viewer.close()

    def test_more_viewers_than_allowed_are_refused_until_one_leaves(self):
        server = self.serve("", 100, 2000, 3)
        viewers = [Events(server) for _ in range(3)]
        self.assertEqual([v.status for v in viewers], [200] * 3)
        status, headers, _ = server.request("/events")
        self.assertEqual((status, headers["retry-after"]), (503, "5"))
        viewers.pop().close()

        def free():
            viewer = Events(server)
            self.addCleanup(viewer.close)
            return viewer.status == 200
        for viewer in viewers:
            self.addCleanup(viewer.close)
        self.eventually(free, "a place is free again")

    def test_huge_headers_and_addresses_are_refused(self):
        server = self.serve()
        for data in (b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
                     b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
                     b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 50_000 + b"\r\n"):
            with server.connect() as s:
                try:
                    s.sendall(data)
                except OSError:
                    pass  # it has closed already
                status = parse(read_to_end(s))[0]
                self.assertIn(status, (0, 400, 413, 414, 431))
        self.assertEqual(server.request("/healthz")[0], 200)

    def test_garbage_is_survived(self):
        server = self.serve()
        for data in (b"\0" * 5000, b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + b"\xff" * 600,
                     b"GET\r\n\r\n", b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n", b"\r\n" * 3000,
                     b"GET /%zz%%%\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
                     b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
                     b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz"):
            with server.connect(timeout=10) as s:
                s.sendall(data)
                s.shutdown(socket.SHUT_WR)
                read_to_end(s)
        self.assertEqual(server.request("/healthz")[0], 200)

    def test_slow_clients_are_closed_and_hold_up_nobody(self):
        server = self.serve("", 200, 1500)
        start = time.monotonic()
        slow = [server.connect() for _ in range(40)]
        for s in slow:
            s.sendall(b"GET / HTTP/1.1\r\nHost: loc")
        open_ones = list(slow)
        while open_ones:
            self.assertLess(time.monotonic() - start, BOUND_S, "they are still open")
            self.assertEqual(server.request("/healthz")[0], 200)
            for s in list(open_ones):
                s.settimeout(0.01)
                try:
                    s.sendall(b"a")  # never silent for long
                    if s.recv(1000) == b"":
                        open_ones.remove(s)
                except TimeoutError:
                    pass
                except OSError:
                    open_ones.remove(s)
            time.sleep(0.1)
        self.assertGreater(time.monotonic() - start, 1.0)
        for s in slow:
            s.close()

    def test_idle_connections_of_anybody_keep_nobody_out(self):
        server = self.serve("", 200, 2 * BOUND_S * 1000)  # nobody is closed for being slow
        with contextlib.ExitStack() as stack:
            viewer = stack.enter_context(server.connect())
            viewer.sendall(f"GET /events?token={server.token} HTTP/1.1\r\nHost: localhost\r\n\r\n"
                           .encode())
            self.assertIn(b"200 OK", viewer.recv(1 << 16))
            for _ in range(300):
                stack.enter_context(server.connect())
            self.assertEqual(server.request("/snapshot")[0], 200)
            for _ in range(3):  # and the one who watches goes on
                self.assertTrue(viewer.recv(1 << 16))

    def test_a_stream_outlives_the_limit_of_a_request(self):
        server = self.serve("", 100, 1000)
        events = Events(server)
        end = time.monotonic() + 4
        while time.monotonic() < end:
            self.assertEqual(events.next()[0], "message")
        events.close()

    def test_a_viewer_that_does_not_read_skips_states_and_delays_no_other(self):
        server = self.serve("", 50, 30_000)  # a busy machine may hold up the one that reads
        big = state(1, log={"0": ["x" * 1000] * 2000})
        server.set(big)
        stuck = Events(server)
        reader = Events(server)
        for step in range(2, 12):
            big["ranks"][0]["step"] = step
            server.set(big)
            while reader.next()[1]["ranks"][0]["step"] != step:
                pass
        stuck.close()
        reader.close()
        self.assertEqual(server.close(), 0)

    def test_it_ends_while_viewers_do_not_read(self):
        server = self.serve("", 50)
        server.set(state(1, log={"0": ["x" * 1000] * 5000}))
        viewers = [Events(server) for _ in range(8)]
        time.sleep(0.5)
        start = time.monotonic()
        self.assertEqual(server.close(), 0)
        self.assertLess(time.monotonic() - start, BOUND_S / 2)
        for viewer in viewers:
            viewer.close()


class Listening(DashboardCase):
    def refused(self, where):
        result = subprocess.run([PEER, where], capture_output=True, text=True, timeout=BOUND_S,
                                stdin=subprocess.DEVNULL)
        self.assertEqual(result.returncode, 2, where)
        return result.stderr

    def test_addresses(self):
        server = self.serve("127.0.0.1:0")
        taken = self.refused(str(server.port))
        self.assertIn(f"[dashboard] --dashboard: cannot listen on 127.0.0.1:{server.port} (Address "
                      "already in use). Another program may have that port.", taken)
        elsewhere = self.refused("203.0.113.9:8080")  # an address of no host
        self.assertIn("cannot listen on 203.0.113.9:8080 (Cannot assign requested address). This "
                      "host has no such address.", elsewhere)
        self.assertNotIn("Another program", elsewhere)
        for where in ("http", "70000", "-1", "8080x", "host:80", "1.2.3:80", "[::1:80", ":80"):
            self.assertIn(f"--dashboard='{where}' is not a port, or a numeric address and a port.",
                          self.refused(where))

    def test_loopback_is_the_default(self):
        server = self.serve()
        with open("/proc/net/tcp") as f:
            rows = [line.split()[1:4] for line in f.readlines()[1:]]
        bound = [local for local, _, kind in rows
                 if kind == "0A" and int(local.split(":")[1], 16) == server.port]
        self.assertEqual([address.split(":")[0] for address in bound], ["0100007F"])

    def test_beyond_loopback_numbers_are_hosts_and_names_are_not(self):
        server = self.serve("0.0.0.0:0")
        self.assertEqual(server.request("/healthz", host="10.1.2.3:80")[0], 200)
        self.assertEqual(server.request("/healthz", host=socket.gethostname())[0], 200)
        self.assertEqual(server.request("/healthz", host="evil.example")[0], 421)


if __name__ == "__main__":
    unittest.main()
