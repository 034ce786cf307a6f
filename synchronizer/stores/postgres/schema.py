"""The tables of the PostgreSQL store, and the functions that change them. Each function is one atomic step.

An append inserts its first chunk under the unique key (segment, start_offset): that is its compare-and-set. It updates
no row, so contenders wait at most for the winner's commit, and there is nothing to clean up. Changes of a segment also
hold an advisory lock of their transaction on its name. Appends share that lock. Steps that must not run during an
append hold it exclusively: seal, delete, the first step of truncate, concat, and an append of attributes only that
expects an offset (it inserts no chunk that could collide).

All steps take their locks in the same order, which prevents deadlocks: advisory locks by number, then attributes by
segment and name, then chunks by segment.

The isolation level is READ COMMITTED: each statement of these functions sees all earlier commits. So a statement after
a lock was obtained sees what the last holder wrote.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

from synchronizer.store import MAX_DELTA_BYTES

#: Larger data is split into several rows, because the server reads and frees large values in portions as well.
CHUNK_BYTES: Final = 64 * 1024
#: The number of slots for waiters; segments share a slot by hash (module `listener`).
INTEREST_SLOTS: Final = 64
FORMAT: Final = 1

_TABLES: Final = """
CREATE TABLE {schema}.segment (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text COLLATE "C" NOT NULL UNIQUE,
    start_offset bigint NOT NULL DEFAULT 0,
    sealed boolean NOT NULL DEFAULT false,
    deleted boolean NOT NULL DEFAULT false,
    freed boolean NOT NULL DEFAULT false
) WITH (fillfactor = 70);
CREATE INDEX segment_to_free ON {schema}.segment (id) WHERE deleted AND NOT freed;

CREATE TABLE {schema}.chunk (
    segment bigint NOT NULL,
    start_offset bigint NOT NULL,
    end_offset bigint NOT NULL,
    data bytea NOT NULL,
    PRIMARY KEY (segment, start_offset)
) WITH (autovacuum_vacuum_scale_factor = 0.05, toast.autovacuum_vacuum_scale_factor = 0.05);
ALTER TABLE {schema}.chunk ALTER COLUMN data SET STORAGE EXTERNAL;

CREATE TABLE {schema}.attribute (
    segment bigint NOT NULL,
    name text COLLATE "C" NOT NULL,
    value bytea NOT NULL,
    PRIMARY KEY (segment, name)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05);

CREATE TABLE {schema}.store (format integer NOT NULL);
"""

# The length of the segment `s`: the end of its last chunk. A segment that is truncated to its end has no chunk.
LENGTH: Final = (
    "COALESCE((SELECT c.end_offset FROM {schema}.chunk c WHERE c.segment = s.id"
    " ORDER BY c.start_offset DESC LIMIT 1), s.start_offset)"
)
# The start of the chunk that holds the byte at an offset.
_FIRST_CHUNK: Final = (
    "(SELECT b.start_offset FROM {schema}.chunk b WHERE b.segment = {id} AND b.start_offset <= {offset}"
    " ORDER BY b.start_offset DESC LIMIT 1)"
)

# Outcomes of `append`: 0 appended, 1 conflict, 2 sealed, 3 not found, 4 the source is not sealed, 5 no such source.
_FUNCTIONS: Final = (
    """
CREATE FUNCTION {schema}.announce(p_name text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    -- Who waits for a segment shares the lock of its slot. If it can be had alone, nobody waits.
    IF pg_try_advisory_lock({interest_slot}) THEN
        PERFORM pg_advisory_unlock({interest_slot});
    ELSE
        PERFORM pg_notify({channel}, p_name);
    END IF;
END $$;
""",
    """
CREATE FUNCTION {schema}.answer_conflict(
    p_id bigint, p_expected bigint, p_attributes text[], p_expectations bytea[], p_anything boolean[],
    OUT length bigint, OUT delta bytea, OUT present bytea[], OUT holds boolean
) LANGUAGE plpgsql AS $$
BEGIN
    SELECT
        {length},
        CASE WHEN p_expected >= s.start_offset AND p_expected < {length} THEN (
            SELECT substr(
                string_agg(c.data, ''::bytea ORDER BY c.start_offset),
                (p_expected - min(c.start_offset))::integer + 1, {max_delta})
            FROM {schema}.chunk c
            WHERE c.segment = p_id AND c.start_offset >= {first_chunk} AND c.start_offset < p_expected + {max_delta})
        END,
        (SELECT array_agg(a.value ORDER BY n.i)
            FROM unnest(p_attributes) WITH ORDINALITY AS n (name, i)
            LEFT JOIN {schema}.attribute a ON a.segment = p_id AND a.name = n.name COLLATE "C")
    INTO length, delta, present
    FROM {schema}.segment s WHERE s.id = p_id;
    holds := p_expected IS NULL OR p_expected = length;
    FOR i IN 1 .. COALESCE(array_length(p_attributes, 1), 0) LOOP
        holds := holds AND (p_anything[i] OR present[i] IS NOT DISTINCT FROM p_expectations[i]);
    END LOOP;
END $$;
""",
    """
CREATE FUNCTION {schema}.change_attributes(
    p_id bigint, p_attributes text[], p_expectations bytea[], p_anything boolean[], p_values bytea[]
) RETURNS boolean LANGUAGE plpgsql AS $$
-- False as soon as one is not what was expected; the caller rolls back. The names come in order. What is only compared
-- or was absent anyway is locked as well: else two steps could each rely on what the other changes.
BEGIN
    FOR i IN 1 .. array_length(p_attributes, 1) LOOP
        IF p_anything[i] AND p_values[i] IS NULL THEN
            LOOP
                DELETE FROM {schema}.attribute WHERE segment = p_id AND name = p_attributes[i];
                EXIT WHEN FOUND;
                INSERT INTO {schema}.attribute VALUES (p_id, p_attributes[i], ''::bytea) ON CONFLICT DO NOTHING;
            END LOOP;
            CONTINUE;
        ELSIF p_anything[i] THEN
            INSERT INTO {schema}.attribute VALUES (p_id, p_attributes[i], p_values[i])
                ON CONFLICT (segment, name) DO UPDATE SET value = excluded.value;
            CONTINUE;
        ELSIF p_expectations[i] IS NULL THEN
            INSERT INTO {schema}.attribute VALUES (p_id, p_attributes[i], COALESCE(p_values[i], ''::bytea))
                ON CONFLICT DO NOTHING;
            IF FOUND AND p_values[i] IS NULL THEN
                DELETE FROM {schema}.attribute WHERE segment = p_id AND name = p_attributes[i];
            END IF;
        ELSIF p_values[i] IS NULL THEN
            DELETE FROM {schema}.attribute
                WHERE segment = p_id AND name = p_attributes[i] AND value = p_expectations[i];
        ELSE
            UPDATE {schema}.attribute SET value = p_values[i]
                WHERE segment = p_id AND name = p_attributes[i] AND value = p_expectations[i];
        END IF;
        IF NOT FOUND THEN
            RETURN false;
        END IF;
    END LOOP;
    RETURN true;
END $$;
""",
    """
CREATE FUNCTION {schema}.insert_chunks(p_id bigint, p_offset bigint, p_data bytea, p_source bigint)
RETURNS boolean LANGUAGE plpgsql AS $$
-- False if somebody else inserted at this offset. Only the first chunk can collide: nobody appends behind bytes that
-- are not committed.
DECLARE
    v_size integer := octet_length(p_data);
    v_first record;
BEGIN
    IF p_source IS NOT NULL THEN
        SELECT c.end_offset, s.start_offset, substr(c.data, (s.start_offset - c.start_offset)::integer + 1) AS data
            INTO v_first FROM {schema}.segment s JOIN {schema}.chunk c ON c.segment = s.id
            WHERE s.id = p_source AND c.end_offset > s.start_offset ORDER BY c.start_offset LIMIT 1;
        IF NOT FOUND THEN
            RETURN true;
        END IF;
        INSERT INTO {schema}.chunk
            VALUES (p_id, p_offset, p_offset + octet_length(v_first.data), v_first.data) ON CONFLICT DO NOTHING;
        IF NOT FOUND THEN
            RETURN false;
        END IF;
        INSERT INTO {schema}.chunk
            SELECT p_id, p_offset + c.start_offset - v_first.start_offset,
                p_offset + c.end_offset - v_first.start_offset, c.data
            FROM {schema}.chunk c WHERE c.segment = p_source AND c.start_offset >= v_first.end_offset;
        RETURN true;
    END IF;
    IF v_size = 0 THEN
        RETURN true;
    END IF;
    INSERT INTO {schema}.chunk
        VALUES (p_id, p_offset, p_offset + LEAST(v_size, {chunk_bytes}), substr(p_data, 1, {chunk_bytes}))
        ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF v_size > {chunk_bytes} THEN
        INSERT INTO {schema}.chunk
            SELECT p_id, p_offset + o, p_offset + LEAST(v_size, o + {chunk_bytes}), substr(p_data, o + 1, {chunk_bytes})
            FROM generate_series({chunk_bytes}, v_size - 1, {chunk_bytes}) AS o;
    END IF;
    RETURN true;
END $$;
""",
    """
CREATE FUNCTION {schema}.append(
    p_name text, p_data bytea, p_source text, p_expected bigint,
    p_attributes text[], p_expectations bytea[], p_anything boolean[], p_values bytea[],
    OUT outcome integer, OUT length bigint, OUT size bigint, OUT delta bytea, OUT present bytea[]
) LANGUAGE plpgsql AS $$
DECLARE
    v_id bigint;
    v_sealed boolean;
    v_source bigint;
    v_holds boolean;
BEGIN
    size := octet_length(p_data);
    IF p_source IS NOT NULL THEN
        PERFORM pg_advisory_xact_lock(k.key) FROM (
            SELECT hashtextextended(n, {lock_seed}) AS key FROM unnest(ARRAY[p_name, p_source]) AS n ORDER BY 1) AS k;
    ELSIF size = 0 AND p_expected IS NOT NULL AND p_attributes IS NOT NULL THEN
        PERFORM pg_advisory_xact_lock({lock_key});
    -- Trying first is an expression, not a query: it is the faster way, and nearly always succeeds.
    ELSIF NOT pg_try_advisory_xact_lock_shared({lock_key}) THEN
        PERFORM pg_advisory_xact_lock_shared({lock_key});
    END IF;
    LOOP
        SELECT s.id, s.sealed, {length} INTO v_id, v_sealed, length
            FROM {schema}.segment s WHERE s.name = p_name AND NOT s.deleted;
        IF NOT FOUND THEN
            outcome := 3;
            RETURN;
        ELSIF v_sealed THEN
            outcome := 2;
            RETURN;
        END IF;
        IF p_source IS NOT NULL AND v_source IS NULL THEN
            SELECT s.id, s.sealed, {length} - s.start_offset INTO v_source, v_sealed, size
                FROM {schema}.segment s WHERE s.name = p_source AND NOT s.deleted;
            IF NOT FOUND THEN
                outcome := 5;
                RETURN;
            ELSIF NOT v_sealed THEN
                outcome := 4;
                RETURN;
            END IF;
        END IF;
        outcome := 1;
        IF p_expected IS NULL OR p_expected = length THEN
            IF p_attributes IS NULL AND size BETWEEN 1 AND {chunk_bytes} AND p_source IS NULL THEN
                -- As insert_chunks does it. Most appends are like this one, and the call would cost a quarter of it.
                INSERT INTO {schema}.chunk VALUES (v_id, length, length + size, p_data) ON CONFLICT DO NOTHING;
                IF FOUND THEN
                    outcome := 0;
                END IF;
            ELSIF p_attributes IS NULL THEN
                IF {schema}.insert_chunks(v_id, length, p_data, v_source) THEN
                    outcome := 0;
                END IF;
            ELSE
                BEGIN
                    IF {schema}.change_attributes(v_id, p_attributes, p_expectations, p_anything, p_values)
                        -- The attributes are locked by now, so both hold at this moment.
                        AND (p_expected IS NULL OR size > 0 OR p_expected = (
                            SELECT {length} FROM {schema}.segment s WHERE s.id = v_id))
                        AND {schema}.insert_chunks(v_id, length, p_data, v_source)
                    THEN
                        outcome := 0;
                    ELSE
                        RAISE SQLSTATE 'RG001';
                    END IF;
                EXCEPTION WHEN SQLSTATE 'RG001' THEN
                    NULL;  -- the attributes are what they were
                END;
            END IF;
        END IF;
        IF outcome = 0 THEN
            length := length + size;
            IF size = 0 THEN
                NULL;
            ELSIF pg_try_advisory_lock({interest_slot}) THEN  -- as `announce` does it
                v_holds := pg_advisory_unlock({interest_slot});
            ELSE
                PERFORM pg_notify({channel}, p_name);
            END IF;
            RETURN;
        END IF;
        SELECT c.length, c.delta, c.present, c.holds INTO length, delta, present, v_holds
            FROM {schema}.answer_conflict(v_id, p_expected, p_attributes, p_expectations, p_anything) AS c;
        IF NOT v_holds THEN
            RETURN;
        END IF;
    END LOOP;
END $$;
""",
    """
CREATE FUNCTION {schema}.append_together(
    p_names text[], p_datas bytea[], p_expected bigint[],
    p_of integer[], p_attributes text[], p_expectations bytea[], p_anything boolean[], p_values bytea[]
) RETURNS TABLE (name text, outcome integer, length bigint, delta bytea, present bytea[]) LANGUAGE plpgsql AS $$
-- `p_of[j]` says to which append the j-th attribute belongs. The rows are all appends, or those that failed.
#variable_conflict use_column
DECLARE
    v_append record;
    v_conflict record;
    v_length bigint;
    v_written boolean;
    v_failed boolean;
BEGIN
    FOR v_append IN
        SELECT n.name, octet_length(p_datas[n.i]) = 0 AND p_expected[n.i] IS NOT NULL AS alone,
            hashtextextended(n.name, {lock_seed}) AS key
        FROM unnest(p_names) WITH ORDINALITY AS n (name, i) ORDER BY 3
    LOOP
        IF v_append.alone THEN
            PERFORM pg_advisory_xact_lock(v_append.key);
        ELSE
            PERFORM pg_advisory_xact_lock_shared(v_append.key);
        END IF;
    END LOOP;
    RETURN QUERY
        SELECT n.name, CASE WHEN s.sealed THEN 2 ELSE 3 END, {length}, NULL::bytea, NULL::bytea[]
        FROM unnest(p_names) WITH ORDINALITY AS n (name, i)
        LEFT JOIN {schema}.segment s ON s.name = n.name COLLATE "C" AND NOT s.deleted
        WHERE s.id IS NULL OR s.sealed ORDER BY n.i LIMIT 1;
    IF FOUND THEN
        RETURN;
    END IF;
    LOOP
        v_written := true;
        BEGIN
            FOR v_append IN
                SELECT s.id, array_agg(a.name ORDER BY a.name COLLATE "C") AS attributes,
                    array_agg(a.expectation ORDER BY a.name COLLATE "C") AS expectations,
                    array_agg(a.anything ORDER BY a.name COLLATE "C") AS anything,
                    array_agg(a.value ORDER BY a.name COLLATE "C") AS new_values
                FROM unnest(p_of, p_attributes, p_expectations, p_anything, p_values)
                    AS a (i, name, expectation, anything, value)
                JOIN {schema}.segment s ON s.name = p_names[a.i] COLLATE "C"
                GROUP BY s.id ORDER BY s.id
            LOOP
                IF NOT {schema}.change_attributes(
                    v_append.id, v_append.attributes, v_append.expectations, v_append.anything, v_append.new_values)
                THEN
                    RAISE SQLSTATE 'RG001';
                END IF;
            END LOOP;
            FOR v_append IN
                SELECT s.id, n.name, n.i FROM unnest(p_names) WITH ORDINALITY AS n (name, i)
                JOIN {schema}.segment s ON s.name = n.name COLLATE "C" ORDER BY s.id
            LOOP
                SELECT {length} INTO v_length FROM {schema}.segment s WHERE s.id = v_append.id;
                IF p_expected[v_append.i] <> v_length
                    OR NOT {schema}.insert_chunks(v_append.id, v_length, p_datas[v_append.i], NULL)
                THEN
                    RAISE SQLSTATE 'RG001';
                END IF;
                IF octet_length(p_datas[v_append.i]) > 0 THEN
                    PERFORM {schema}.announce(v_append.name);
                END IF;
            END LOOP;
        EXCEPTION WHEN SQLSTATE 'RG001' THEN
            v_written := false;
        END;
        IF v_written THEN
            RETURN QUERY
                SELECT n.name, 0, {length}, NULL::bytea, NULL::bytea[]
                FROM unnest(p_names) WITH ORDINALITY AS n (name, i)
                JOIN {schema}.segment s ON s.name = n.name COLLATE "C" ORDER BY n.i;
            RETURN;
        END IF;
        v_failed := false;
        FOR v_append IN
            SELECT s.id, n.name, n.i,
                (SELECT array_agg(a.name ORDER BY a.j) FROM unnest(p_of, p_attributes) WITH ORDINALITY AS a (i, name, j)
                    WHERE a.i = n.i) AS attributes,
                (SELECT array_agg(a.e ORDER BY a.j) FROM unnest(p_of, p_expectations) WITH ORDINALITY AS a (i, e, j)
                    WHERE a.i = n.i) AS expectations,
                (SELECT array_agg(a.y ORDER BY a.j) FROM unnest(p_of, p_anything) WITH ORDINALITY AS a (i, y, j)
                    WHERE a.i = n.i) AS anything
            FROM unnest(p_names) WITH ORDINALITY AS n (name, i)
            JOIN {schema}.segment s ON s.name = n.name COLLATE "C" ORDER BY n.i
        LOOP
            SELECT * INTO v_conflict FROM {schema}.answer_conflict(
                v_append.id, p_expected[v_append.i], v_append.attributes, v_append.expectations, v_append.anything);
            IF NOT v_conflict.holds THEN
                v_failed := true;
                RETURN QUERY
                    SELECT v_append.name, 1, v_conflict.length, v_conflict.delta, v_conflict.present;
            END IF;
        END LOOP;
        IF v_failed THEN
            RETURN;
        END IF;
    END LOOP;
END $$;
""",
    """
CREATE FUNCTION {schema}.create_segment(p_name text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO {schema}.segment (name) VALUES (p_name) ON CONFLICT DO NOTHING;
    IF FOUND THEN
        RETURN 'created';
    END IF;
    RETURN (SELECT CASE WHEN s.deleted THEN 'deleted' ELSE 'exists' END FROM {schema}.segment s WHERE s.name = p_name);
END $$;
""",
    """
CREATE FUNCTION {schema}.delete_segment(p_name text) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_id bigint;
BEGIN
    PERFORM pg_advisory_xact_lock({lock_key});
    SELECT s.id INTO v_id FROM {schema}.segment s WHERE s.name = p_name;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE {schema}.segment SET deleted = true WHERE id = v_id AND NOT deleted;
    IF FOUND THEN
        DELETE FROM {schema}.attribute WHERE segment = v_id;
        PERFORM {schema}.announce(p_name);
    END IF;
    RETURN true;
END $$;
""",
    """
CREATE FUNCTION {schema}.seal_segment(p_name text, OUT start_offset bigint, OUT length bigint) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    PERFORM pg_advisory_xact_lock({lock_key});
    UPDATE {schema}.segment SET sealed = true WHERE name = p_name AND NOT deleted AND NOT sealed;
    IF FOUND THEN
        PERFORM {schema}.announce(p_name);
    END IF;
    SELECT s.start_offset, {length} INTO start_offset, length
        FROM {schema}.segment s WHERE s.name = p_name AND NOT s.deleted;
END $$;
""",
    """
CREATE FUNCTION {schema}.truncate_segment(p_name text, p_offset bigint, OUT id bigint, OUT length bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
-- When this is committed, no append is under way that knows of a shorter segment: the chunks may go.
BEGIN
    PERFORM pg_advisory_xact_lock({lock_key});
    SELECT s.id, {length} INTO id, length FROM {schema}.segment s WHERE s.name = p_name AND NOT s.deleted;
    IF p_offset BETWEEN 0 AND length THEN
        UPDATE {schema}.segment s SET start_offset = p_offset WHERE s.name = p_name AND s.start_offset < p_offset;
    END IF;
END $$;
""",
    """
CREATE FUNCTION {schema}.free_chunks(p_id bigint, p_limit integer) RETURNS boolean LANGUAGE plpgsql AS $$
-- Whether there may be more that nothing refers to. Whoever else frees the same chunks now is left to it.
DECLARE
    v_count integer;
BEGIN
    DELETE FROM {schema}.chunk WHERE ctid = ANY (ARRAY(
        SELECT c.ctid FROM {schema}.chunk c JOIN {schema}.segment s ON s.id = c.segment
        WHERE c.segment = p_id AND (s.deleted OR c.end_offset <= s.start_offset)
        ORDER BY c.start_offset LIMIT p_limit FOR UPDATE OF c SKIP LOCKED));
    GET DIAGNOSTICS v_count = ROW_COUNT;
    IF v_count < p_limit THEN
        UPDATE {schema}.segment SET freed = true WHERE id = p_id AND deleted AND NOT freed
            AND NOT EXISTS (SELECT FROM {schema}.chunk c WHERE c.segment = p_id);
    END IF;
    RETURN v_count = p_limit;
END $$;
""",
)


#: The statements that migrate a store from each older format to the next.
MIGRATIONS: Final[Mapping[int, str]] = {}


class Names:
    """Fills in the placeholders in the statements of one schema."""

    def __init__(self, schema: str) -> None:
        self.schema = f'"{schema}"'
        self.channel = schema
        self._lock_seed = _number("segment", schema)
        self._fair_seed = _number("fair lock", schema)
        self.creation_lock = _number("creation", schema)
        self._interest_base = _number("interest", schema) & ~(INTEREST_SLOTS - 1)

    def fill(self, statement: str) -> str:
        length = LENGTH.replace("{schema}", self.schema)
        first_chunk = _FIRST_CHUNK.replace("{id}", "p_id").replace("{offset}", "p_expected")
        values = {
            "{first_chunk}": first_chunk,
            "{length}": length,
            "{schema}": self.schema,
            "{channel}": f"'{self.channel}'",
            "{lock_seed}": str(self._lock_seed),
            "{fair_key}": f"hashtextextended($1::text, {self._fair_seed})",
            "{interest_slot}": f"{self._interest_base} + ({{lock_key}} & {INTEREST_SLOTS - 1})",
            "{lock_key}": f"hashtextextended(p_name, {self._lock_seed})",
            "{max_delta}": str(MAX_DELTA_BYTES),
            "{chunk_bytes}": str(CHUNK_BYTES),
        }
        for placeholder, value in values.items():
            statement = statement.replace(placeholder, value)
        return statement

    def creation(self) -> str:
        """Return the statements that turn an empty schema into a store."""
        insert = f"INSERT INTO {self.schema}.store VALUES ({FORMAT});"
        return self.fill("\n".join((_TABLES, *_FUNCTIONS))) + insert

    def migration(self, found: int) -> str:
        """Return the statements that migrate a store of an older format to this release's."""
        steps = [MIGRATIONS[format] for format in range(found, FORMAT)]
        return self.fill("\n".join(steps)) + f"UPDATE {self.schema}.store SET format = {FORMAT};"


def _number(purpose: str, schema: str) -> int:
    """Return a lock number: the same in every release and process, and unlikely to collide in the database."""
    digest = hashlib.blake2b(f"readergroup {purpose} {schema}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True) >> 1  # leaves room to add a slot
