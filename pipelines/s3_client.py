"""The connection to S3: one client per process, its retries, and errors that say what a user can do.

`AWS_ENDPOINT_URL`, `AWS_MAX_ATTEMPTS`, the region and the credentials are found as everywhere with boto3.
"""

import functools
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

from workers.errors import InputError

SCHEME = "s3://"
CONNECT_TIMEOUT, READ_TIMEOUT = 10, 60
# The waits between six calls add up to half a minute at most.
_NUM_ATTEMPTS = 6
_LONGEST_WAIT = 20.0
_DENIED = ("AccessDenied", "403", "InvalidAccessKeyId", "SignatureDoesNotMatch", "Forbidden", "AllAccessDisabled")
_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired", "RequestTimeTooSkewed")
_OTHER_REGION = ("PermanentRedirect", "301", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException")


def split(uri: str) -> tuple[str, str]:
    """The bucket and the key of a URI; the key is taken as it stands, nothing in it is decoded or simplified.

    Raises:
        InputError: no bucket.
    """
    bucket, _, key = uri[len(SCHEME) :].partition("/")
    if not bucket:
        raise InputError(uri, "no bucket name", "s3://bucket/key")
    return bucket, key


def num_attempts() -> int:
    """How often a call is tried: `AWS_MAX_ATTEMPTS`, or six times."""
    return int(os.environ.get("AWS_MAX_ATTEMPTS", _NUM_ATTEMPTS))


def back_off(attempt: int) -> None:
    """Waits before the next attempt: up to 1, 2, 4, ... seconds after attempt 1, 2, 3, ..., as botocore does."""
    time.sleep(random.uniform(0.0, min(_LONGEST_WAIT, 2.0 ** (attempt - 1))))


@functools.cache
def client() -> Any:
    """The client of this process; calls that find no answer or a busy server are tried again, with back-off."""
    import boto3
    from botocore.config import Config

    retries = {"mode": "standard", "total_max_attempts": num_attempts()}
    config = Config(retries=retries, connect_timeout=CONNECT_TIMEOUT, read_timeout=READ_TIMEOUT)
    return boto3.session.Session().client("s3", config=config)


def arrow_filesystem(uri: str) -> S3FileSystem:
    """pyarrow's view of the same S3, for a bucket that must exist. It travels to other processes, its credentials do not.

    Raises:
        InputError: the bucket is missing or may not be used, or S3 does not answer.
    """
    bucket = split(uri)[0]
    with clear_errors(uri):
        try:
            head = client().head_bucket(Bucket=bucket)
        except exceptions().ClientError as error:
            if error.response["Error"]["Code"] != "404":
                raise
            raise input_error(uri, "NoSuchBucket") or error from error
    headers = head["ResponseMetadata"]["HTTPHeaders"]
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return _RetryingFileSystem(headers.get("x-amz-bucket-region") or client().meta.region_name, endpoint)


class _RetryingFileSystem(S3FileSystem):
    """pyarrow forgets the retries of a filesystem that goes to another process; here they are set anew there."""

    def __init__(self, region: str, endpoint: str | None) -> None:
        super().__init__(
            region=region,
            endpoint_override=endpoint,
            connect_timeout=CONNECT_TIMEOUT,
            request_timeout=READ_TIMEOUT,
            retry_strategy=AwsStandardS3RetryStrategy(max_attempts=num_attempts()),
        )
        self._arguments = (region, endpoint)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments


def exceptions() -> Any:
    """The exceptions of botocore, which takes a while to import."""
    import botocore.exceptions

    return botocore.exceptions


@contextmanager
def clear_errors(uri: str) -> Iterator[None]:
    """Turns what a user can fix (missing, denied, unreachable) into `InputError`; other errors get the URI as a note."""
    kinds = exceptions()
    try:
        yield
    except kinds.ClientError as error:
        known = input_error(uri, error.response["Error"]["Code"])
        if known is not None:
            raise known from error
        error.add_note(f"while using {uri}")
        raise
    except kinds.ParamValidationError as error:
        raise InputError(uri, "a bucket or key name that S3 does not take", "s3://bucket/key") from error
    except (kinds.NoCredentialsError, kinds.PartialCredentialsError, kinds.TokenRetrievalError) as error:
        raise InputError(uri, f"no S3 credentials ({error})", "AWS credentials in the environment") from error
    except (kinds.HTTPClientError, kinds.ConnectionError, kinds.IncompleteReadError) as error:
        advice = "Check the network, AWS_ENDPOINT_URL and AWS_REGION."
        raise InputError(uri, f"no answer from S3 ({error})", "a reachable S3 endpoint", advice) from error


def input_error(uri: str, code: str) -> InputError | None:
    """What the user can do about an error code of S3; None for a code that is not the user's."""
    if code == "NoSuchBucket":
        bucket = split(uri)[0]
        return InputError(uri, f"no bucket {bucket!r}", "an existing bucket", "Check the name and AWS_ENDPOINT_URL.")
    if code == "InvalidBucketName":
        return InputError(uri, f"the bucket name {split(uri)[0]!r}, which is not valid", "s3://bucket/key")
    if code in ("NoSuchKey", "404", "NotFound"):
        return InputError(uri, "no such object", "an existing S3 object", "Check the bucket and the key.")
    if code == "KeyTooLongError":
        return InputError(uri, "a key that is too long", "a key of at most 1024 bytes")
    if code in _DENIED:
        return InputError(uri, f"access denied ({code})", "credentials that may use this path")
    if code in _EXPIRED:
        return InputError(
            uri, f"credentials that are no longer valid ({code})", "fresh ones", "Renew them, or the clock."
        )
    if code == "400":  # the answer to a HEAD has no body that would tell which
        return InputError(uri, "a request that S3 refuses (400)", "valid credentials, and the region of the bucket")
    if code in _OTHER_REGION:
        return InputError(uri, f"a bucket of another region ({code})", "its own region", "Set AWS_REGION to it.")
    if code in ("PreconditionFailed", "412"):
        return InputError(uri, "an object that changed while it was read", "input that stays the same during a run")
    return None
