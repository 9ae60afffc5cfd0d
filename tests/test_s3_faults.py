"""What happens when S3 is busy, slow, gone, or refuses: retries with back-off, whole contents, and errors that say what to do."""

import os
import time

import pytest
from botocore.exceptions import ClientError
from s3_server import Fault, StartProxy

from pipelines import s3_client, storage
from workers.errors import InputError


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that clients wanted to wait between attempts; they do not."""
    seconds: list[float] = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    return seconds


@pytest.mark.parametrize("fault", [(500, "InternalError"), (503, "SlowDown"), (429, "TooManyRequests"), "reset"])
def test_a_call_is_tried_again_with_growing_waits(
    bucket: str, proxy: StartProxy, waits: list[float], fault: Fault
) -> None:
    calls = proxy(lambda method, path, number: fault if number <= 4 else None)
    storage.publish_bytes(f"{bucket}/x", b"content")
    assert [method for method, _ in calls.seen] == ["PUT"] * 5
    assert len(waits) == 4
    assert all(0 <= wait <= limit for wait, limit in zip(waits, [1, 2, 4, 8], strict=True))
    assert storage.read_bytes(f"{bucket}/x") == b"content"


def test_a_server_that_stays_busy_fails_with_the_path(bucket: str, proxy: StartProxy, waits: list[float]) -> None:
    calls = proxy(lambda method, path, number: (503, "SlowDown"))
    with pytest.raises(ClientError, match="SlowDown") as caught:
        storage.publish_bytes(f"{bucket}/x", b"")
    assert f"{bucket}/x" in "".join(caught.value.__notes__)
    assert len(calls.seen) == 6


def test_the_number_of_attempts_can_be_set(
    bucket: str, proxy: StartProxy, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    calls = proxy(lambda method, path, number: (500, "InternalError"))
    with pytest.raises(ClientError):
        storage.list_folder(bucket)
    assert len(calls.seen) == 2


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ((403, "AccessDenied"), "access denied"),
        ((403, "InvalidAccessKeyId"), "access denied"),
        ((400, "ExpiredToken"), "no longer valid"),
        ((403, "RequestTimeTooSkewed"), "no longer valid"),
        ((400, "AuthorizationHeaderMalformed"), "another region"),
    ],
)
def test_refusals_say_what_is_wrong(bucket: str, proxy: StartProxy, fault: Fault, words: str) -> None:
    proxy(lambda method, path, number: fault)
    with pytest.raises(InputError, match=words):
        storage.list_folder(f"{bucket}/x")
    with pytest.raises(InputError, match=words):
        storage.publish_bytes(f"{bucket}/x", b"")
    with pytest.raises(InputError, match="access denied|refuses"):  # a HEAD answer has a status and no code
        storage.find_file(f"{bucket}/x")


def test_nobody_answers(bucket: str, waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    s3_client.client.cache_clear()
    try:
        for call in (storage.list_folder, storage.run_storage, lambda path: storage.publish_bytes(path, b"")):
            with pytest.raises(InputError, match=r"no answer from S3 .*AWS_ENDPOINT_URL"):
                call(f"{bucket}/x")
    finally:
        s3_client.client.cache_clear()


def test_no_credentials(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    s3_client.client.cache_clear()
    try:
        with pytest.raises(InputError, match="no S3 credentials"):
            storage.list_folder(bucket)
    finally:
        s3_client.client.cache_clear()


def test_a_slow_answer_is_waited_for(bucket: str, proxy: StartProxy) -> None:
    calls = proxy(lambda method, path, number: 3.0 if method == "PUT" else None)
    storage.publish_bytes(f"{bucket}/x", b"slow")
    assert storage.read_bytes(f"{bucket}/x") == b"slow"
    assert [method for method, _ in calls.seen].count("PUT") == 1


def test_an_answer_that_breaks_off_is_asked_for_again(bucket: str, proxy: StartProxy, waits: list[float]) -> None:
    content = os.urandom(100_000)
    storage.publish_bytes(f"{bucket}/x", content)
    calls = proxy(lambda method, path, number: "cut" if method == "GET" and number <= 2 else None)
    assert storage.read_bytes(f"{bucket}/x") == content
    assert [method for method, _ in calls.seen] == ["HEAD", "GET", "GET", "GET"]
    proxy(lambda method, path, number: "cut" if method == "GET" else None)
    with pytest.raises(InputError, match="no answer from S3"):
        storage.read_bytes(f"{bucket}/x")


def test_a_new_file_whose_answer_is_lost_is_still_ours(bucket: str, proxy: StartProxy, waits: list[float]) -> None:
    """The second attempt finds the file of the first: without a look at its content both holders of a lock would give up."""
    calls = proxy(lambda method, path, number: "lost" if method == "PUT" and number == 1 else None)
    assert storage.publish_new(f"{bucket}/lock", b"one")
    assert [method for method, _ in calls.seen].count("PUT") == 2
    assert not storage.publish_new(f"{bucket}/lock", b"two")


def test_a_new_file_in_dispute_is_asked_for_again(bucket: str, proxy: StartProxy, waits: list[float]) -> None:
    fault = (409, "ConditionalRequestConflict")
    proxy(lambda method, path, number: fault if method == "PUT" and number <= 2 else None)
    assert storage.publish_new(f"{bucket}/lock", b"one")
    assert len(waits) == 2


def test_checkpoints_are_uploaded_through_faults(bucket: str, proxy: StartProxy) -> None:
    """pyarrow forgets its retries when a filesystem is sent to a worker; three faults are more than it takes without them."""
    import pickle

    calls = proxy(lambda method, path, number: (503, "SlowDown") if method == "PUT" and number <= 3 else None)
    settings = storage.run_storage(f"{bucket}/run")
    filesystem = pickle.loads(pickle.dumps(settings["storage_filesystem"]))
    with filesystem.open_output_stream(f"{settings['storage_path']}/a") as file:
        file.write(b"weights")
    assert storage.read_bytes(f"{bucket}/run/a") == b"weights"
    assert [method for method, _ in calls.seen].count("PUT") == 4
