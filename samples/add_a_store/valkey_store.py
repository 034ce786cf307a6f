"""Segments on Valkey, or Redis 7: ``valkey://user:password@host:6379/0?prefix=shop``; ``valkeys://`` uses TLS.

All keys begin with the prefix. Other options of the address, such as ``socket_timeout=3``, go to redis-py.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from redis import ConnectionPool
from redis.exceptions import BusyLoadingError, OutOfMemoryError, RedisError, ResponseError

import synchronizer as sc
from synchronizer.stores import checks

# Each operation on a segment is one run of this script, and the server runs nothing else meanwhile. A segment is a hash
# with its start, length and state, a hash of its attributes, and a stream of chunks whose ids are their offsets.
SCRIPT = """
local call, meta, chunks, values, names = redis.call, unpack(KEYS)
local verb, segment, a, b = unpack(ARGV, 1, 4)
local start, length, state = unpack(call('HMGET', meta, 'start', 'length', 'state'))
start, length = tonumber(start), tonumber(length)

local function id(offset, number) return string.format('%.0f-%d', offset, number or 1) end
local function holding(offset) return call('XREVRANGE', chunks, id(offset), '-', 'COUNT', 1)[1][1] end
local function bytes(from, count)
  local last, parts = math.min(from + count, length), {}
  if from < start or from >= last then return '' end
  local first = holding(from)
  for i, chunk in ipairs(call('XRANGE', chunks, first, id(last - 1))) do parts[i] = chunk[2][2] end
  return string.sub(table.concat(parts), from - tonumber(string.match(first, '%d+')) + 1):sub(1, last - from)
end

if verb == 'create' then
  if state then return state end
  call('HSET', meta, 'start', a, 'length', a, 'state', 'open')
  call('ZADD', names, 0, segment)
  return 'created'
elseif not state or (state == 'deleted' and verb ~= 'delete') then return 'missing'
elseif verb == 'append' then  -- the data, the expected offset or '', then for each attribute its name, what it must be
  local now, holds = {}, b == '' or tonumber(b) == length  -- ('*' anything, '-' none, '=...') and what it becomes
  for i = 5, #ARGV, 3 do
    local value = call('HGET', values, ARGV[i])
    now[#now + 1] = value
    holds = holds and (ARGV[i + 1] == '*' or ARGV[i + 1] == (value and '=' .. value or '-'))
  end
  if state == 'sealed' then return {'sealed', length} end
  if not holds then return {'conflict', length, b == '' and '' or bytes(tonumber(b), MAX_DELTA_BYTES), now} end
  call('HSET', meta, 'length', string.format('%.0f', length + #a))  -- first: it fails where there is no memory
  for first = 0, #a - 1, 65536 do
    call('XADD', chunks, id(length + first), 'data', string.sub(a, first + 1, first + 65536))
  end
  for i = 5, #ARGV, 3 do
    if ARGV[i + 2] == '-' then call('HDEL', values, ARGV[i]) else call('HSET', values, ARGV[i], ARGV[i + 2]:sub(2)) end
  end
  return {'appended', length, length + #a}
elseif verb == 'read' then return {start, length, bytes(tonumber(a), tonumber(b))}
elseif verb == 'attributes' then
  if a == 'all' then return call('HGETALL', values) end
  local found = {}
  for i = 4, #ARGV do found[2 * i - 7], found[2 * i - 6] = ARGV[i], call('HGET', values, ARGV[i]) end
  return found
elseif verb == 'truncate' and tonumber(a) > start and tonumber(a) <= length then
  call('HSET', meta, 'start', a)
  call('XTRIM', chunks, 'MINID', holding(tonumber(a)))  -- one chunk always stays: it tells who waits of the change
elseif verb == 'seal' and state == 'open' then
  call('HSET', meta, 'state', 'sealed')
  call('XADD', chunks, id(length), 'sealed', '')  -- for who waits: an entry beyond all data
elseif verb == 'delete' and state ~= 'deleted' then
  call('HSET', meta, 'state', 'deleted')  -- this stays: the name is used up
  call('XADD', chunks, 'MAXLEN', 1, id(length, 2), 'deleted', '')
  call('DEL', values); call('ZREM', names, segment)
end
return {start, length, call('HGET', meta, 'state')}
""".replace("MAX_DELTA_BYTES", str(sc.MAX_DELTA_BYTES))
FREEING_SCRIPT = "#!lua flags=allow-oom\n" + SCRIPT  # operations that free memory must work when memory is full
LENGTHS = "local r = {}; for i, k in ipairs(KEYS) do r[i] = redis.call('HMGET', k, 'length', 'state') end; return r"


class AnswerLost(sc.StoreUnavailableError):
    """The request was sent, and the connection failed before the answer."""


class ValkeyStore(sc.SegmentStore):
    """Segments on one primary. Its configuration decides whether it may lose acknowledged data."""

    guarantees = sc.Guarantees(
        durable=False, linearizable_append=True, linearizable_read=True, push=True, many_processes=True, many_hosts=True
    )

    def __init__(self, url: str, *, clock: sc.Clock | None = None, must_exist: bool = False) -> None:
        parts = urlsplit(url)
        options = {"socket_timeout": "10", **dict(parse_qsl(parts.query))}
        prefix = options.pop("prefix", "readergroup")
        address = parts._replace(scheme="rediss" if parts.scheme == "valkeys" else "redis", query=urlencode(options))
        # A pool, not a client: a client repeats unanswered requests, so an append could be stored twice.
        self._pool = ConnectionPool.from_url(address.geturl())
        self.url = parts._replace(netloc=parts.netloc.rpartition("@")[2], query=urlencode({"prefix": prefix})).geturl()
        self._key = "{" + prefix + "}:"  # one slot, if the server is a cluster
        self._clock, self._process_id, self._closed = clock or sc.SystemClock(), os.getpid(), False
        try:
            exists = self._request("EXISTS", self._key + "names")
        except TypeError as error:
            raise sc.InvalidArgumentError("the address has unknown options", url=self.url, cause=str(error)) from error
        if must_exist and not exists:
            raise sc.NotFoundError("there are no segments at this address; correct it", url=self.url)

    def create(self, segment: str, *, start_offset: int = 0) -> bool:
        checks.check_create(segment, start_offset)
        if (answer := self._verb("create", segment, start_offset)) == b"deleted":
            raise checks.name_is_used_up(segment)
        return bool(answer == b"created")

    def delete(self, segment: str) -> None:
        self._verb("delete", segment)

    def info(self, segment: str) -> sc.SegmentInfo:
        start_offset, length, state = self._verb("info", segment)
        return sc.SegmentInfo(segment, start_offset, length, sealed=state == b"sealed")

    def list(self, prefix: str = "") -> Iterator[str]:
        checks.check_prefix(prefix)
        self._check_open()
        return self._names(prefix.encode())

    def append(
        self, segment: str, data: bytes, *, expected_offset: int | None = None, attributes: Changes | None = None
    ) -> sc.AppendResult:
        checks.check_append(segment, data, expected_offset, attributes)
        arguments: list[Any] = [data, "" if expected_offset is None else expected_offset]
        for name, change in (attributes or {}).items():
            arguments += name, b"*" if change.expected is sc.ANY else _value(change.expected), _value(change.new)
        try:
            outcome, *facts = self._verb("append", segment, *arguments)
        except AnswerLost as error:
            return sc.UnknownOutcome(error)
        if outcome == b"sealed":
            raise checks.sealed(segment, facts[0])
        if outcome == b"conflict":
            return sc.Conflict(facts[0], facts[1], dict(zip(attributes or (), facts[2], strict=True)))
        return sc.Appended(*facts)

    def read(self, segment: str, offset: int, max_bytes: int) -> bytes:
        checks.check_read_call(segment, offset, max_bytes)
        *bounds, data = self._verb("read", segment, offset, max_bytes)
        checks.check_read(segment, offset, max_bytes, *bounds)
        return bytes(data)

    def attributes(self, segment: str, prefix: str = "", *, names: Collection[str] | None = None) -> dict[str, bytes]:
        checks.check_attributes(segment, prefix, names)
        found = self._verb("attributes", segment, "all" if names is None else "named", *(names or ()))
        pairs = zip(map(bytes.decode, found[::2]), found[1::2], strict=True)
        return {name: value for name, value in pairs if value is not None and name.startswith(prefix)}

    def truncate(self, segment: str, offset: int) -> None:
        checks.check_truncate(segment, offset)
        checks.check_within(segment, offset, self._verb("truncate", segment, offset)[1])

    def seal(self, segment: str) -> sc.SegmentInfo:
        start_offset, length, _ = self._verb("seal", segment)
        return sc.SegmentInfo(segment, start_offset, length, sealed=True)

    def wait(self, known: Mapping[str, int], timeout: float) -> frozenset[str]:
        checks.check_wait(known, timeout)
        deadline = sc.Deadline(self._clock, timeout)
        while not (changed := self._changed(known)) and not deadline.passed:
            # Wait a second at most, to notice that the store was closed; 0 would wait for ever.
            milliseconds = max(1, int(deadline.remaining(1.0) * 1000))
            # XREAD needs at least one stream.
            streams = {self._key + "nothing": "0-0"} | {f"{self._key}chunks:{n}": f"{known[n]}-0" for n in known}
            self._request("XREAD", "COUNT", 1, "BLOCK", milliseconds, "STREAMS", *streams, *streams.values())
        return changed

    def close(self) -> None:
        if not self._closed and os.getpid() == self._process_id:
            self._closed = True
            self._pool.disconnect(inuse_connections=False)  # a thread that uses one notices when its answer arrives

    def _changed(self, known: Mapping[str, int]) -> frozenset[str]:
        changed = set()
        answers = self._request("EVAL", LENGTHS, len(known), *(f"{self._key}meta:{name}" for name in known))
        for (name, seen), (length, state) in zip(known.items(), answers, strict=True):
            if length is None:
                raise checks.not_found(name)
            if int(length) != seen or state != b"open":
                changed.add(name)
        return frozenset(changed)

    def _names(self, prefix: bytes) -> Iterator[str]:
        first, end = b"[" + prefix, b"(" + prefix + b"\xff"  # 0xff never occurs in UTF-8
        while page := self._request("ZRANGEBYLEX", self._key + "names", first, end, "LIMIT", 0, 1000):
            yield from map(bytes.decode, page)
            first = b"(" + page[-1]

    def _verb(self, verb: str, segment: str, *arguments: Any) -> Any:
        checks.check_name(segment)
        keys = [f"{self._key}{kind}:{segment}" for kind in ("meta", "chunks", "attributes")]
        script = FREEING_SCRIPT if verb in ("truncate", "delete") else SCRIPT
        answer = self._request("EVAL", script, 4, *keys, self._key + "names", verb, segment, *arguments)
        if answer == b"missing":
            raise checks.not_found(segment)
        return answer

    def _request(self, *command: Any) -> Any:
        self._check_open()
        try:
            connection: Any = self._pool.get_connection()
        except (RedisError, OSError) as error:
            raise sc.StoreUnavailableError("Valkey is unreachable", url=self.url, cause=str(error)) from error
        try:
            connection.send_command(*command)
            return connection.read_response()
        except (ResponseError, BusyLoadingError) as error:  # the server answered: it did nothing
            kind = sc.StoreFullError if isinstance(error, OutOfMemoryError) else sc.StoreUnavailableError
            raise kind("Valkey refuses the request", url=self.url, cause=str(error)) from error
        except (RedisError, OSError) as error:
            self._check_open()
            raise AnswerLost("Valkey did not answer", url=self.url, cause=str(error)) from error
        finally:
            self._pool.release(connection)
            if self._closed:
                self._pool.disconnect(inuse_connections=False)

    def _check_open(self) -> None:
        if os.getpid() != self._process_id:
            raise sc.ClosedError("the store belongs to the parent process; open it after the fork")
        if self._closed:
            raise sc.ClosedError("the store is closed", url=self.url)


Changes = Mapping[str, sc.AttributeChange]


def _value(value: bytes | None) -> bytes:
    return b"-" if value is None else b"=" + value
