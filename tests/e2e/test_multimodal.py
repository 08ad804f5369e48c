"""Images and audio at the door: what workers see, routing by their content, and how URLs are
fetched."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from threading import Event, Thread
from typing import Any

import pytest

from common.request.media import MediaHashes, content_hash, with_media
from common.request.preprocessed import TokenIds
from kvmesh.router.v1 import router_pb2, router_pb2_grpc
from tests.kit.bombs import MEDIA_BOMBS, image_url
from tests.kit.oracle import Oracle
from tests.kit.processes import MODEL, Mesh, Service
from tests.kit.waiting import WAIT_S, wait_for
from worker_svc.engines.sim.config import SimModel, load_sim_model
from worker_svc.engines.sim.make_model import write_model

pytestmark = pytest.mark.slow

PNG = b"\x89PNG\r\n\x1a\n"
WAV = b"RIFF\x10\0\0\0WAVE"
CAT, DOG = PNG + b"cat" * 100, PNG + b"dog" * 100
TEXT = "Describe the picture in all its parts, please, and compare it with the others."
BLOCK = 16
IMAGE_TOKENS = 64
# Their ids follow those of the sim's tokenizer.
PLACEHOLDERS = 4096
LIMIT_MB = 1
NUMBERS = count()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


# Any, here and below: JSON.
def image(source: bytes | str) -> Any:
    url = source if isinstance(source, str) else data_url(source)
    return {"type": "image_url", "image_url": {"url": url}}


def text(content: str) -> Any:
    return {"type": "text", "text": content}


def audio(data: bytes) -> Any:
    clip = {"data": base64.b64encode(data).decode(), "format": "wav"}
    return {"type": "input_audio", "input_audio": clip}


class Site(BaseHTTPRequestHandler):
    """A site on loopback. `/slow` sends the first bytes of an image and no more."""

    released = Event()

    def do_GET(self) -> None:
        match self.path.split("?")[0]:
            case "/cat.png":
                self._send(200, CAT, "image/png")
            case "/text.png":
                self._send(200, b"<html>not an image</html>", "image/png")
            case "/page":
                self._send(200, CAT, "text/html")
            case "/unknown.png":
                self._send(200, CAT, "application/octet-stream")
            case "/large.png":
                self._send(200, PNG + bytes(LIMIT_MB << 20), "image/png")
            case "/endless.png":
                self._start(200, "image/png")
                while not self.released.is_set():
                    try:
                        self.wfile.write(PNG + bytes(1 << 16))
                    except OSError:
                        return
            case "/slow.png":
                self._start(200, "image/png")
                self.wfile.write(PNG)
                self.released.wait(30)
            case "/redirect":
                self.send_response(302)
                self.send_header("location", self.path.partition("?")[2])
                self.end_headers()
            case "/loop":
                self.send_response(302)
                self.send_header("location", "/loop")
                self.end_headers()
            case _:
                self._send(404, b"", "text/plain")

    def _start(self, status: int, media_type: str) -> None:
        self.send_response(status)
        self.send_header("content-type", media_type)
        self.end_headers()

    def _send(self, status: int, body: bytes, media_type: str) -> None:
        self.send_response(status)
        self.send_header("content-type", media_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class SiteServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The frontend closed the connection."""


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    server = SiteServer(("127.0.0.1", 0), Site)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    Site.released.set()
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, takes_media=True)
    return folder


@pytest.fixture(scope="module")
def flags(model_dir: Any) -> list[str]:
    return [f"--model-path={model_dir}", "--speedup=10"]


@pytest.fixture(scope="module")
def model(model_dir: Any) -> SimModel:
    return load_sim_model(model_dir)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, flags: list[str], site: str) -> Iterator[Mesh]:
    fetching = ["--media-urls", f"--media-hosts={site}", "--media-timeout-s=1"]
    with Mesh(
        tmp_path_factory.mktemp("mesh"),
        workers=2,
        indexers=1,
        worker_flags=flags,
        # Only load and cached blocks count.
        router_flags=["--recent-miss-weight=0"],
        frontend_flags=[*fetching, f"--media-limit-mb={LIMIT_MB}"],
    ) as mesh:
        yield mesh


def post(mesh: Mesh, content: Any, client_id: str = "", **fields: Any) -> Any:
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 12}
    headers = {"x-request-id": client_id} if client_id else {}
    return mesh.http.post(f"{mesh.url}/v1/chat/completions", json=body | fields, headers=headers)


def answer(mesh: Mesh, *content: Any, **fields: Any) -> tuple[str, int]:
    """Text and prompt tokens of a chat."""
    response = post(mesh, content, **fields)
    assert response.status_code == 200, response.text
    body = response.json()
    return body["choices"][0]["message"]["content"], body["usage"]["prompt_tokens"]


def tokens(mesh: Mesh, *content: Any) -> list[int]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
    found: list[int] = mesh.http.post(f"{mesh.url}/tokenize", json=body).json()["tokens"]
    return found


@pytest.mark.row("S2-30", "S2-32", "S2-36")
def test_the_output_depends_on_each_medium_and_on_their_order(mesh: Mesh, model: SimModel) -> None:
    """The oracle continues the prompt in which the media's content stands for the placeholders."""
    picture, clip = model.media["image"], model.media["audio"]
    parts = [image(CAT), text(TEXT), image(DOG), audio(WAV)]
    prompt = TokenIds.of(tokens(mesh, *parts))
    assert prompt.tolist().count(picture.token_id) == 2 * picture.tokens
    assert prompt.tolist().count(clip.token_id) == clip.tokens
    media = [
        MediaHashes(picture, [content_hash(CAT), content_hash(DOG)]),
        MediaHashes(clip, [content_hash(WAV)]),
    ]
    expected = Oracle().completion(with_media(prompt, media).tolist(), 12)
    assert answer(mesh, *parts) == (expected.text, len(prompt))
    for token_data in (prompt.tolist(), compact(prompt.tolist())):
        fields = {"nvext": {"token_data": token_data}}
        assert answer(mesh, *parts, **fields) == (expected.text, len(prompt))
    others = [
        [image(DOG), text(TEXT), image(CAT), audio(WAV)],
        [image(CAT), text(TEXT), image(CAT), audio(WAV)],
        [image(CAT), text(TEXT), image(DOG), audio(WAV + b"1")],
        [image(CAT), text(TEXT), image(DOG)],
    ]
    assert len({answer(mesh, *one)[0] for one in [parts, *others]}) == 5


@pytest.mark.row("S1-38", "S2-29", "S2-87")
def test_an_image_enters_the_hashes_of_its_blocks_in_preprocess(mesh: Mesh) -> None:
    def block_hashes(picture: bytes) -> list[int]:
        content = [text(TEXT), image(picture), text(TEXT)]
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
        response = mesh.http.post(f"{mesh.url}/v1/internal/preprocess", json=body)
        found: list[int] = response.json()["hashes"][0]["block_hashes"]
        return found

    cat, dog = block_hashes(CAT), block_hashes(DOG)
    assert cat[0] == dog[0]
    assert cat[-1] == dog[-1]
    assert set(cat) - set(dog)


def compact(token_ids: list[int]) -> list[int]:
    """One placeholder for each medium."""
    return [
        token
        for token, before in zip(token_ids, [-1, *token_ids], strict=False)
        if token < PLACEHOLDERS or token != before
    ]


@pytest.mark.row("S1-30", "S1-68", "S2-28", "S2-37", "S2-64")
def test_equal_texts_go_to_the_worker_that_holds_their_image(mesh: Mesh) -> None:
    """Router, index and KV events of the engine agree: the prediction is what the engine reports,
    and it includes the image."""
    question = text("What is this? " + TEXT)
    cat, dog = image(PNG + b"a cat"), image(PNG + b"a dog")
    homes = {"cat": (mesh.workers[0], cat), "dog": (mesh.workers[1], dog)}
    for name, (home, picture) in homes.items():
        fill(mesh, name, home, picture, question)
    for name, (home, picture) in homes.items():
        line = line_of(mesh, f"{name}-again", picture, question)
        assert line["workers"] == [str(home.instance_id)]
        assert line["cached_tokens"] == line["predicted_cached_tokens"] > IMAGE_TOKENS + BLOCK
    for name, content in (("none", [question]), ("bird", [image(PNG + b"a bird"), question])):
        line = line_of(mesh, name, *content)
        assert line["cached_tokens"] == line["predicted_cached_tokens"] < BLOCK


def fill(mesh: Mesh, name: str, home: Service, *content: Any) -> None:
    """Computes a prompt on one worker, and waits until the router knows all its blocks."""
    pin = {"nvext": {"backend_instance_id": str(home.instance_id)}}
    assert line_of(mesh, f"{name}-first", *content, **pin)["cached_tokens"] < BLOCK

    def is_known() -> bool:
        line = line_of(mesh, f"{name}-{next(NUMBERS)}", *content, **pin)
        cached: int = line["cached_tokens"]
        return BLOCK < cached == int(line["predicted_cached_tokens"])

    wait_for(is_known, "the index has the blocks of the prompt")


def line_of(mesh: Mesh, client_id: str, *content: Any, **fields: Any) -> Any:
    """The log line of a chat."""
    answer(mesh, *content, client_id=client_id, **fields)
    line = mesh.request_line(client_id)
    # It could still count against the next request.
    wait_for(lambda: not running_requests(mesh), "the router knows that the workers are idle")
    return line


def running_requests(mesh: Mesh) -> int:
    """What the router's bookings and the workers' last load reports count."""
    stub = router_pb2_grpc.RouterServiceStub(mesh.router.channel)
    request = router_pb2.ExplainRequest(query=router_pb2.Query(model=MODEL, total_tokens=1))
    candidates = stub.Explain(request, timeout=WAIT_S).candidates
    return mesh.router.bookings() + sum(one.load.active_requests for one in candidates)


@pytest.mark.row("S1-85")
def test_explain_shows_which_worker_holds_an_image(mesh: Mesh) -> None:
    content = [image(PNG + b"a fish"), text(TEXT)]
    home = mesh.workers[0]
    fill(mesh, "fish", home, *content)
    line = line_of(mesh, "fish-explained", *content)
    stub = router_pb2_grpc.RouterServiceStub(mesh.router.channel)
    request = router_pb2.ExplainRequest(request_id=f"chatcmpl-{line['request_id']}")
    blocks = {
        str(one.worker.worker_id): one.overlap_blocks
        for one in stub.Explain(request, timeout=WAIT_S).candidates
    }
    assert blocks.pop(str(home.instance_id)) * BLOCK == line["cached_tokens"] > IMAGE_TOKENS
    assert list(blocks.values()) == [0]


@pytest.mark.parametrize("api", ["messages", "responses"])
def test_other_apis_translate_their_images(mesh: Mesh, api: str) -> None:
    expected = answer(mesh, image(CAT), text(TEXT))
    if api == "messages":
        source = {"type": "base64", "media_type": "image/png", "data": data_url(CAT)[22:]}
        content = [{"type": "image", "source": source}, text(TEXT)]
        body: Any = {"messages": [{"role": "user", "content": content}], "max_tokens": 12}
        count = mesh.http.post(
            f"{mesh.url}/v1/messages/count_tokens",
            json={"model": MODEL, "messages": body["messages"]},
        )
        assert count.json() == {"input_tokens": expected[1]}
    else:
        content = [
            {"type": "input_image", "image_url": data_url(CAT)},
            {"type": "input_text", "text": TEXT},
        ]
        body = {"input": [{"role": "user", "content": content}], "max_output_tokens": 12}
    response = mesh.http.post(f"{mesh.url}/v1/{api}", json={"model": MODEL, **body}).json()
    if api == "messages":
        assert response["content"][0]["text"] == expected[0]
        return
    assert response["output"][0]["content"][0]["text"] == expected[0]
    stored = mesh.http.get(f"{mesh.url}/v1/responses/{response['id']}/input_items").json()
    assert stored["data"][0]["content"] == content
    again = {"model": MODEL, "input": "And?", "previous_response_id": response["id"]}
    usage = mesh.http.post(f"{mesh.url}/v1/responses", json=again).json()["usage"]
    assert usage["input_tokens"] > expected[1], "the image is part of the conversation"


def test_placeholders_in_text_are_ordinary_text(mesh: Mesh) -> None:
    forged = answer(mesh, image(CAT), text("<|image|> and <|audio|>"))
    assert forged[1] > answer(mesh, image(CAT), text("and"))[1]


@pytest.mark.parametrize(
    ("content", "param", "code"),
    [
        ([image("data:image/png;base64,!")], "image_url", "invalid_media"),
        ([image("data:image/png,abc")], "image_url", "invalid_media"),
        ([image(data_url(b"GIF is not here"))], "image_url", "invalid_media"),
        ([image(data_url(CAT, "text/html"))], "image_url", "invalid_media"),
        ([image(data_url(WAV))], "image_url", "invalid_media"),
        ([audio(CAT)], "input_audio", "invalid_media"),
        ([image(PNG + bytes(LIMIT_MB << 20))], "image_url", "media_too_large"),
        ([image(CAT)] * 9, "", "invalid_value"),
        ([{"type": "video_url", "video_url": {"url": "x"}}], "type", "unsupported_parameter"),
        ([{"type": "image_url"}], "image_url", "missing_required_parameter"),
        ([image("")], "image_url.url", "invalid_value"),
    ],
)
def test_an_invalid_medium_is_refused_by_name(
    mesh: Mesh, content: list[Any], param: str, code: str
) -> None:
    error = post(mesh, content).json()["error"]
    index = len(content) - 1
    assert error["code"] == code, error
    assert error["param"] == f"messages[0].content[{index}].{param or 'image_url'}"


@pytest.mark.row("S2-35")
def test_embeddings_of_a_prompt_are_refused_by_name(mesh: Mesh) -> None:
    response = mesh.post_completion("embeds", "hi", prompt_embeds="gASVAAAA")
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", "prompt_embeds")


def test_only_messages_of_user_and_tool_have_media(mesh: Mesh) -> None:
    messages = [{"role": role, "content": [image(CAT)]} for role in ("user", "system")]
    error = post(mesh, "", messages=messages).json()["error"]
    assert error["code"] == "unsupported_parameter"
    assert error["param"] == "messages[1].content[0].image_url"


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("cat.png", ""),
        ("unknown.png", ""),
        ("redirect?/cat.png", ""),
        ("text.png", "invalid_media"),
        ("page", "invalid_media"),
        ("missing.png", "media_unavailable"),
        ("large.png", "media_too_large"),
        ("endless.png", "media_too_large"),
        ("slow.png", "media_unavailable"),
        ("loop", "media_refused"),
        ("redirect?http://127.0.0.1/cat.png", "media_refused"),
        ("redirect?http://169.254.169.254/latest/meta-data/", "media_refused"),
        ("redirect?file:///etc/passwd", "media_refused"),
        ("redirect?http://localhost/", "media_refused"),
    ],
)
def test_a_url_is_fetched_once_its_source_and_content_are_checked(
    mesh: Mesh, site: str, path: str, code: str
) -> None:
    assert_fetched(mesh, f"http://{site}/{path}", code)


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1/a.png", "http://localhost/a.png", "http://LOCALHOST:80/a.png"),
        *("http://2130706433/a.png", "http://0x7f.1/a.png", "http://127.1/a.png"),
        *("http://[::1]/a.png", "http://[::ffff:127.0.0.1]/a.png", "http://[::]/a.png"),
        *("http://0.0.0.0/a.png", "http://10.0.0.1/a.png", "http://192.168.1.1/a.png"),
        *("http://169.254.169.254/latest", "http://100.100.100.200/", "http://168.63.129.16/"),
        *("http://[fd00:ec2::254]/", "http://[fe80::1]/", "http://[64:ff9b::7f00:1]/"),
        *("http://224.0.0.1/", "http://[ff02::1]/", "http://8.8.8.8:22/", "ftp://8.8.8.8/a.png"),
        *("file:///etc/passwd", "gopher://127.0.0.1/", "http:///a.png", "http://u:p@8.8.8.8/", "x"),
    ],
)
def test_a_url_outside_the_public_internet_is_refused(mesh: Mesh, url: str) -> None:
    assert_fetched(mesh, url, "media_refused")


def assert_fetched(mesh: Mesh, url: str, code: str) -> None:
    content = [text("What?"), image(url)]
    if not code:
        assert answer(mesh, *content) == answer(mesh, text("What?"), image(CAT))
        return
    response = post(mesh, content)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, code), error
    assert error["param"] == "messages[0].content[1].image_url"


def test_prefill_and_decode_give_the_response_of_one_worker(
    mesh: Mesh, flags: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected = answer(mesh, image(CAT), text(TEXT)), answer(mesh, image(DOG), text(TEXT))
    folder = tmp_path_factory.mktemp("split")
    with Mesh(folder, workers=0, prefill=1, decode=1, worker_flags=flags) as split:
        assert answer(split, image(CAT), text(TEXT)) == expected[0]
        assert answer(split, image(DOG), text(TEXT)) == expected[1]
        # URLs are off by default.
        error = post(split, [image("https://example.org/a.png")]).json()["error"]
        assert (error["code"], error["param"]) == (
            "media_refused",
            "messages[0].content[0].image_url",
        )


def test_a_migrated_response_is_that_of_an_undisturbed_one(mesh: Mesh) -> None:
    content = [image(CAT), text("Go on. " + TEXT)]
    options = {"max_tokens": 150, "ignore_eos": True}
    expected, _ = answer(mesh, *content, **options)
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "stream": True}
    received = ""
    with mesh.http.stream("POST", f"{mesh.url}/v1/chat/completions", json=body | options) as stream:
        number = 0
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            number += 1
            if number == 8:
                next(worker for worker in mesh.workers if worker.open_slots()).kill()
            received += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    assert received == expected


@pytest.mark.parametrize("name", MEDIA_BOMBS)
def test_an_image_with_too_many_pixels_reaches_no_engine(mesh: Mesh, name: str) -> None:
    media_type, content = MEDIA_BOMBS[name]
    parts = [text(TEXT), image(image_url(media_type, content))]
    messages = [{"role": "user", "content": parts}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 4}
    response = mesh.http.post(f"{mesh.url}/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == "messages[0].content[1].image_url"
    assert "pixels, at most" in error["message"]
