CREATE SCHEMA readergroup;

CREATE TABLE "readergroup".segment (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text COLLATE "C" NOT NULL UNIQUE,
    start_offset bigint NOT NULL DEFAULT 0,
    sealed boolean NOT NULL DEFAULT false,
    deleted boolean NOT NULL DEFAULT false,
    freed boolean NOT NULL DEFAULT false
) WITH (fillfactor = 70);
CREATE INDEX segment_to_free ON "readergroup".segment (id) WHERE deleted AND NOT freed;

CREATE TABLE "readergroup".chunk (
    segment bigint NOT NULL,
    start_offset bigint NOT NULL,
    end_offset bigint NOT NULL,
    data bytea NOT NULL,
    PRIMARY KEY (segment, start_offset)
) WITH (autovacuum_vacuum_scale_factor = 0.05, toast.autovacuum_vacuum_scale_factor = 0.05);
ALTER TABLE "readergroup".chunk ALTER COLUMN data SET STORAGE EXTERNAL;

CREATE TABLE "readergroup".attribute (
    segment bigint NOT NULL,
    name text COLLATE "C" NOT NULL,
    value bytea NOT NULL,
    PRIMARY KEY (segment, name)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05);

CREATE TABLE "readergroup".store (format integer NOT NULL);


CREATE FUNCTION "readergroup".announce(p_name text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    -- Who waits for a segment shares the lock of its slot. If it can be had alone, nobody waits.
    IF pg_try_advisory_lock(1493174453695576320 + (hashtextextended(p_name, -444066169075659362) & 63)) THEN
        PERFORM pg_advisory_unlock(1493174453695576320 + (hashtextextended(p_name, -444066169075659362) & 63));
    ELSE
        PERFORM pg_notify('readergroup', p_name);
    END IF;
END $$;


CREATE FUNCTION "readergroup".answer_conflict(
    p_id bigint, p_expected bigint, p_attributes text[], p_expectations bytea[], p_anything boolean[],
    OUT length bigint, OUT delta bytea, OUT present bytea[], OUT holds boolean
) LANGUAGE plpgsql AS $$
BEGIN
    SELECT
        COALESCE((SELECT c.end_offset FROM "readergroup".chunk c WHERE c.segment = s.id ORDER BY c.start_offset DESC LIMIT 1), s.start_offset),
        CASE WHEN p_expected >= s.start_offset AND p_expected < COALESCE((SELECT c.end_offset FROM "readergroup".chunk c WHERE c.segment = s.id ORDER BY c.start_offset DESC LIMIT 1), s.start_offset) THEN (
            SELECT substr(
                string_agg(c.data, ''::bytea ORDER BY c.start_offset),
                (p_expected - min(c.start_offset))::integer + 1, 65536)
            FROM "readergroup".chunk c
            WHERE c.segment = p_id AND c.start_offset >= (SELECT b.start_offset FROM "readergroup".chunk b WHERE b.segment = p_id AND b.start_offset <= p_expected ORDER BY b.start_offset DESC LIMIT 1) AND c.start_offset < p_expected + 65536)
        END,
        (SELECT array_agg(a.value ORDER BY n.i)
            FROM unnest(p_attributes) WITH ORDINALITY AS n (name, i)
            LEFT JOIN "readergroup".attribute a ON a.segment = p_id AND a.name = n.name COLLATE "C")
    INTO length, delta, present
    FROM "readergroup".segment s WHERE s.id = p_id;
    holds := p_expected IS NULL OR p_expected = length;
    FOR i IN 1 .. COALESCE(array_length(p_attributes, 1), 0) LOOP
        holds := holds AND (p_anything[i] OR present[i] IS NOT DISTINCT FROM p_expectations[i]);
    END LOOP;
END $$;


CREATE FUNCTION "readergroup".change_attributes(
    p_id bigint, p_attributes text[], p_expectations bytea[], p_anything boolean[], p_values bytea[]
) RETURNS boolean LANGUAGE plpgsql AS $$
-- False as soon as one is not what was expected; the caller rolls back. The names come in order. What is only compared
-- or was absent anyway is locked as well: else two steps could each rely on what the other changes.
BEGIN
    FOR i IN 1 .. array_length(p_attributes, 1) LOOP
        IF p_anything[i] AND p_values[i] IS NULL THEN
            LOOP
                DELETE FROM "readergroup".attribute WHERE segment = p_id AND name = p_attributes[i];
                EXIT WHEN FOUND;
                INSERT INTO "readergroup".attribute VALUES (p_id, p_attributes[i], ''::bytea) ON CONFLICT DO NOTHING;
            END LOOP;
            CONTINUE;
        ELSIF p_anything[i] THEN
            INSERT INTO "readergroup".attribute VALUES (p_id, p_attributes[i], p_values[i])
                ON CONFLICT (segment, name) DO UPDATE SET value = excluded.value;
            CONTINUE;
        ELSIF p_expectations[i] IS NULL THEN
            INSERT INTO "readergroup".attribute VALUES (p_id, p_attributes[i], COALESCE(p_values[i], ''::bytea))
                ON CONFLICT DO NOTHING;
            IF FOUND AND p_values[i] IS NULL THEN
                DELETE FROM "readergroup".attribute WHERE segment = p_id AND name = p_attributes[i];
            END IF;
        ELSIF p_values[i] IS NULL THEN
            DELETE FROM "readergroup".attribute
                WHERE segment = p_id AND name = p_attributes[i] AND value = p_expectations[i];
        ELSE
            UPDATE "readergroup".attribute SET value = p_values[i]
                WHERE segment = p_id AND name = p_attributes[i] AND value = p_expectations[i];
        END IF;
        IF NOT FOUND THEN
            RETURN false;
        END IF;
    END LOOP;
    RETURN true;
END $$;


CREATE FUNCTION "readergroup".insert_chunks(p_id bigint, p_offset bigint, p_data bytea, p_source bigint)
RETURNS boolean LANGUAGE plpgsql AS $$
-- False if somebody else inserted at this offset. Only the first chunk can collide: nobody appends behind bytes that
-- are not committed.
DECLARE
    v_size integer := octet_length(p_data);
    v_first record;
BEGIN
    IF p_source IS NOT NULL THEN
        SELECT c.end_offset, s.start_offset, substr(c.data, (s.start_offset - c.start_offset)::integer + 1) AS data
            INTO v_first FROM "readergroup".segment s JOIN "readergroup".chunk c ON c.segment = s.id
            WHERE s.id = p_source AND c.end_offset > s.start_offset ORDER BY c.start_offset LIMIT 1;
        IF NOT FOUND THEN
            RETURN true;
        END IF;
        INSERT INTO "readergroup".chunk
            VALUES (p_id, p_offset, p_offset + octet_length(v_first.data), v_first.data) ON CONFLICT DO NOTHING;
        IF NOT FOUND THEN
            RETURN false;
        END IF;
        INSERT INTO "readergroup".chunk
            SELECT p_id, p_offset + c.start_offset - v_first.start_offset,
                p_offset + c.end_offset - v_first.start_offset, c.data
            FROM "readergroup".chunk c WHERE c.segment = p_source AND c.start_offset >= v_first.end_offset;
        RETURN true;
    END IF;
    IF v_size = 0 THEN
        RETURN true;
    END IF;
    INSERT INTO "readergroup".chunk
        VALUES (p_id, p_offset, p_offset + LEAST(v_size, 65536), substr(p_data, 1, 65536))
        ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF v_size > 65536 THEN
        INSERT INTO "readergroup".chunk
            SELECT p_id, p_offset + o, p_offset + LEAST(v_size, o + 65536), substr(p_data, o + 1, 65536)
            FROM generate_series(65536, v_size - 1, 65536) AS o;
    END IF;
    RETURN true;
END $$;


CREATE FUNCTION "readergroup".append(
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
            SELECT hashtextextended(n, -444066169075659362) AS key FROM unnest(ARRAY[p_name, p_source]) AS n ORDER BY 1) AS k;
    ELSIF size = 0 AND p_expected IS NOT NULL AND p_attributes IS NOT NULL THEN
        PERFORM pg_advisory_xact_lock(hashtextextended(p_name, -444066169075659362));
    -- Trying first is an expression, not a query: it is the faster way, and nearly always succeeds.
    ELSIF NOT pg_try_advisory_xact_lock_shared(hashtextextended(p_name, -444066169075659362)) THEN
        PERFORM pg_advisory_xact_lock_shared(hashtextextended(p_name, -444066169075659362));
    END IF;
    LOOP
        SELECT s.id, s.sealed, COALESCE((SELECT c.end_offset FROM "readergroup".chunk c WHERE c.segment = s.id ORDER BY c.start_offset DESC LIMIT 1), s.start_offset) INTO v_id, v_sealed, length
            FROM "readergroup".segment s WHERE s.name = p_name AND NOT s.deleted;
        IF NOT FOUND THEN
            outcome := 3;
            RETURN;
        ELSIF v_sealed THEN
            outcome := 2;
            RETURN;
        END IF;
        IF p_source IS NOT NULL AND v_source IS NULL THEN
            SELECT s.id, s.sealed, COALESCE((SELECT c.end_offset FROM "readergroup".chunk c WHERE c.segment = s.id ORDER BY c.start_offset DESC LIMIT 1), s.start_offset) - s.start_offset INTO v_source, v_sealed, size
                FROM "readergroup".segment s WHERE s.name = p_source AND NOT s.deleted;
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
            IF p_attributes IS NULL AND size BETWEEN 1 AND 65536 AND p_source IS NULL THEN
                -- As insert_chunks does it. Most appends are like this one, and the call would cost a quarter of it.
                INSERT INTO "readergroup".chunk VALUES (v_id, length, length + size, p_data) ON CONFLICT DO NOTHING;
                IF FOUND THEN
                    outcome := 0;
                END IF;
            ELSIF p_attributes IS NULL THEN
                IF "readergroup".insert_chunks(v_id, length, p_data, v_source) THEN
                    outcome := 0;
                END IF;
            ELSE
                BEGIN
                    IF "readergroup".change_attributes(v_id, p_attributes, p_expectations, p_anything, p_values)
                        -- The attributes are locked by now, so both hold at this moment.
                        AND (p_expected IS NULL OR size > 0 OR p_expected = (
                            SELECT COALESCE((SELECT c.end_offset FROM "readergroup".chunk c WHERE c.segment = s.id ORDER BY c.start_offset DESC LIMIT 1), s.start_offset) FROM "readergroup".segment s WHERE s.id = v_id))
                        AND "readergroup".insert_chunks(v_id, length, p_data, v_source)
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
            ELSIF pg_try_advisory_lock(1493174453695576320 + (hashtextextended(p_name, -444066169075659362) & 63)) THEN  -- as `announce` does it
                v_holds := pg_advisory_unlock(1493174453695576320 + (hashtextextended(p_name, -444066169075659362) & 63));
            ELSE
                PERFORM pg_notify('readergroup', p_name);
            END IF;
            RETURN;
        END IF;
        SELECT c.length, c.delta, c.present, c.holds INTO length, delta, present, v_holds
            FROM "readergroup".answer_conflict(v_id, p_expected, p_attributes, p_expectations, p_anything) AS c;
        IF NOT v_holds THEN
            RETURN;
        END IF;
    END LOOP;
END $$;


CREATE FUNCTION "readergroup".append_together(
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
            hashtextextended(n.name, -444066169075659362) AS key
        FROM unnest(p_names) WITH ORDINALITY AS n (name, i) ORDER BY 3
    LOOP
        IF v_append.alone THEN
            PERFORM pg_advisory_xact_lock(v_append.key);
        ELSE
            PERFORM pg_advisory_xact_lock_shared(v_append.key);
        END IF;
    END LOOP;
    RETURN QUERY
        SELECT n.name, CASE WHEN s.sealed THEN 2 ELSE 3 END, COALESCE((SELECT c.end_offset FROM "readergroup".chunk c WHERE c.segment = s.id ORDER BY c.start_offset DESC LIMIT 1), s.start_offset), NULL::bytea, NULL::bytea[]
        FROM unnest(p_names) WITH ORDINALITY AS n (name, i)
        LEFT JOIN "readergroup".segment s ON s.name = n.name COLLATE "C" AND NOT s.deleted
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
                JOIN "readergroup".segment s ON s.name = p_names[a.i] COLLATE "C"
                GROUP BY s.id ORDER BY s.id
            LOOP
                IF NOT "readergroup".change_attributes(
                    v_append.id, v_append.attributes, v_append.expectations, v_append.anything, v_append.new_values)
                THEN
                    RAISE SQLSTATE 'RG001';
                END IF;
            END LOOP;
            FOR v_append IN
                SELECT s.id, n.name, n.i FROM unnest(p_names) WITH ORDINALITY AS n (name, i)
                JOIN "readergroup".segment s ON s.name = n.name COLLATE "C" ORDER BY s.id
            LOOP
                SELECT COALESCE((SELECT c.end_offset FROM "readergroup".chunk c WHERE c.segment = s.id ORDER BY c.start_offset DESC LIMIT 1), s.start_offset) INTO v_length FROM "readergroup".segment s WHERE s.id = v_append.id;
                IF p_expected[v_append.i] <> v_length
                    OR NOT "readergroup".insert_chunks(v_append.id, v_length, p_datas[v_append.i], NULL)
                THEN
                    RAISE SQLSTATE 'RG001';
                END IF;
                IF octet_length(p_datas[v_append.i]) > 0 THEN
                    PERFORM "readergroup".announce(v_append.name);
                END IF;
            END LOOP;
        EXCEPTION WHEN SQLSTATE 'RG001' THEN
            v_written := false;
        END;
        IF v_written THEN
            RETURN QUERY
                SELECT n.name, 0, COALESCE((SELECT c.end_offset FROM "readergroup".chunk c WHERE c.segment = s.id ORDER BY c.start_offset DESC LIMIT 1), s.start_offset), NULL::bytea, NULL::bytea[]
                FROM unnest(p_names) WITH ORDINALITY AS n (name, i)
                JOIN "readergroup".segment s ON s.name = n.name COLLATE "C" ORDER BY n.i;
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
            JOIN "readergroup".segment s ON s.name = n.name COLLATE "C" ORDER BY n.i
        LOOP
            SELECT * INTO v_conflict FROM "readergroup".answer_conflict(
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


CREATE FUNCTION "readergroup".create_segment(p_name text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO "readergroup".segment (name) VALUES (p_name) ON CONFLICT DO NOTHING;
    IF FOUND THEN
        RETURN 'created';
    END IF;
    RETURN (SELECT CASE WHEN s.deleted THEN 'deleted' ELSE 'exists' END FROM "readergroup".segment s WHERE s.name = p_name);
END $$;


CREATE FUNCTION "readergroup".delete_segment(p_name text) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_id bigint;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended(p_name, -444066169075659362));
    SELECT s.id INTO v_id FROM "readergroup".segment s WHERE s.name = p_name;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE "readergroup".segment SET deleted = true WHERE id = v_id AND NOT deleted;
    IF FOUND THEN
        DELETE FROM "readergroup".attribute WHERE segment = v_id;
        PERFORM "readergroup".announce(p_name);
    END IF;
    RETURN true;
END $$;


CREATE FUNCTION "readergroup".seal_segment(p_name text, OUT start_offset bigint, OUT length bigint) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended(p_name, -444066169075659362));
    UPDATE "readergroup".segment SET sealed = true WHERE name = p_name AND NOT deleted AND NOT sealed;
    IF FOUND THEN
        PERFORM "readergroup".announce(p_name);
    END IF;
    SELECT s.start_offset, COALESCE((SELECT c.end_offset FROM "readergroup".chunk c WHERE c.segment = s.id ORDER BY c.start_offset DESC LIMIT 1), s.start_offset) INTO start_offset, length
        FROM "readergroup".segment s WHERE s.name = p_name AND NOT s.deleted;
END $$;


CREATE FUNCTION "readergroup".truncate_segment(p_name text, p_offset bigint, OUT id bigint, OUT length bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
-- When this is committed, no append is under way that knows of a shorter segment: the chunks may go.
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended(p_name, -444066169075659362));
    SELECT s.id, COALESCE((SELECT c.end_offset FROM "readergroup".chunk c WHERE c.segment = s.id ORDER BY c.start_offset DESC LIMIT 1), s.start_offset) INTO id, length FROM "readergroup".segment s WHERE s.name = p_name AND NOT s.deleted;
    IF p_offset BETWEEN 0 AND length THEN
        UPDATE "readergroup".segment s SET start_offset = p_offset WHERE s.name = p_name AND s.start_offset < p_offset;
    END IF;
END $$;


CREATE FUNCTION "readergroup".free_chunks(p_id bigint, p_limit integer) RETURNS boolean LANGUAGE plpgsql AS $$
-- Whether there may be more that nothing refers to. Whoever else frees the same chunks now is left to it.
DECLARE
    v_count integer;
BEGIN
    DELETE FROM "readergroup".chunk WHERE ctid = ANY (ARRAY(
        SELECT c.ctid FROM "readergroup".chunk c JOIN "readergroup".segment s ON s.id = c.segment
        WHERE c.segment = p_id AND (s.deleted OR c.end_offset <= s.start_offset)
        ORDER BY c.start_offset LIMIT p_limit FOR UPDATE OF c SKIP LOCKED));
    GET DIAGNOSTICS v_count = ROW_COUNT;
    IF v_count < p_limit THEN
        UPDATE "readergroup".segment SET freed = true WHERE id = p_id AND deleted AND NOT freed
            AND NOT EXISTS (SELECT FROM "readergroup".chunk c WHERE c.segment = p_id);
    END IF;
    RETURN v_count = p_limit;
END $$;

INSERT INTO readergroup.segment OVERRIDING SYSTEM VALUE VALUES (1, 'shop/small', 0, false, false, false);
INSERT INTO readergroup.segment OVERRIDING SYSTEM VALUE VALUES (2, 'shop/large', 0, true, false, false);
INSERT INTO readergroup.segment OVERRIDING SYSTEM VALUE VALUES (3, 'shop/shared', 0, false, false, false);
INSERT INTO readergroup.segment OVERRIDING SYSTEM VALUE VALUES (4, 'shop/empty', 0, true, false, false);
INSERT INTO readergroup.segment OVERRIDING SYSTEM VALUE VALUES (5, 'shop/truncated', 1008, false, false, false);
INSERT INTO readergroup.segment OVERRIDING SYSTEM VALUE VALUES (6, 'shop/deleted', 0, false, true, true);
INSERT INTO readergroup.segment OVERRIDING SYSTEM VALUE VALUES (8, 'shop/together', 0, false, false, false);
INSERT INTO readergroup.segment OVERRIDING SYSTEM VALUE VALUES (9, 'shop/copy', 1008, true, false, false);
INSERT INTO readergroup.segment OVERRIDING SYSTEM VALUE VALUES (10, 'shop/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/name', 0, false, false, false);
INSERT INTO readergroup.segment OVERRIDING SYSTEM VALUE VALUES (11, 'shop/ä b.*>~%/', 0, false, false, false);
INSERT INTO readergroup.chunk OVERRIDING SYSTEM VALUE VALUES (1, 0, 8, '\x6576656e7420303b');
INSERT INTO readergroup.chunk OVERRIDING SYSTEM VALUE VALUES (1, 8, 16, '\x6576656e7420313b');
INSERT INTO readergroup.chunk OVERRIDING SYSTEM VALUE VALUES (1, 16, 24, '\x6576656e7420323b');
INSERT INTO readergroup.chunk OVERRIDING SYSTEM VALUE VALUES (1, 24, 32, '\x6576656e7420333b');
INSERT INTO readergroup.chunk OVERRIDING SYSTEM VALUE VALUES (1, 32, 40, '\x6576656e7420343b');
INSERT INTO readergroup.chunk OVERRIDING SYSTEM VALUE VALUES (1, 40, 48, '\x6576656e7420353b');
INSERT INTO readergroup.chunk OVERRIDING SYSTEM VALUE VALUES (1, 48, 56, '\x6576656e7420363b');
INSERT INTO readergroup.chunk OVERRIDING SYSTEM VALUE VALUES (1, 56, 64, '\x6576656e7420373b');
INSERT INTO readergroup.chunk OVERRIDING SYSTEM VALUE VALUES (1, 64, 72, '\x6576656e7420383b');
INSERT INTO readergroup.chunk OVERRIDING SYSTEM VALUE VALUES (1, 72, 80, '\x6576656e7420393b');
INSERT INTO readergroup.chunk OVERRIDING SYSTEM VALUE VALUES (1, 80, 84, '\x6c617374');
INSERT INTO readergroup.chunk OVERRIDING SYSTEM VALUE VALUES (2, 0, 65536, convert_to(substr(repeat('0123456789abcdef', 4098), 1, 65536), 'UTF8'));
INSERT INTO readergroup.chunk OVERRIDING SYSTEM VALUE VALUES (2, 65536, 67200, convert_to(substr(repeat('0123456789abcdef', 106), 1, 1664), 'UTF8'));
INSERT INTO readergroup.chunk OVERRIDING SYSTEM VALUE VALUES (2, 67200, 67216, '\x30313233343536373839616263646566');
INSERT INTO readergroup.chunk OVERRIDING SYSTEM VALUE VALUES (3, 0, 6, '\x6265666f7265');
INSERT INTO readergroup.chunk OVERRIDING SYSTEM VALUE VALUES (3, 6, 65542, convert_to(substr(repeat('0123456789abcdef', 4098), 1, 65536), 'UTF8'));
INSERT INTO readergroup.chunk OVERRIDING SYSTEM VALUE VALUES (3, 65542, 67206, convert_to(substr(repeat('0123456789abcdef', 106), 1, 1664), 'UTF8'));
INSERT INTO readergroup.chunk OVERRIDING SYSTEM VALUE VALUES (3, 67206, 67222, '\x30313233343536373839616263646566');
INSERT INTO readergroup.chunk OVERRIDING SYSTEM VALUE VALUES (3, 67222, 132758, convert_to(substr(repeat('0123456789abcdef', 4098), 1, 65536), 'UTF8'));
INSERT INTO readergroup.chunk OVERRIDING SYSTEM VALUE VALUES (3, 132758, 134422, convert_to(substr(repeat('0123456789abcdef', 106), 1, 1664), 'UTF8'));
INSERT INTO readergroup.chunk OVERRIDING SYSTEM VALUE VALUES (3, 134422, 134438, '\x30313233343536373839616263646566');
INSERT INTO readergroup.chunk OVERRIDING SYSTEM VALUE VALUES (5, 0, 65536, convert_to(substr(repeat('0123456789abcdef', 4098), 1, 65536), 'UTF8'));
INSERT INTO readergroup.chunk OVERRIDING SYSTEM VALUE VALUES (5, 65536, 67200, convert_to(substr(repeat('0123456789abcdef', 106), 1, 1664), 'UTF8'));
INSERT INTO readergroup.chunk OVERRIDING SYSTEM VALUE VALUES (8, 0, 5, '\x6669727374');
INSERT INTO readergroup.chunk OVERRIDING SYSTEM VALUE VALUES (9, 1008, 65536, convert_to(substr(repeat('0123456789abcdef', 4035), 1, 64528), 'UTF8'));
INSERT INTO readergroup.chunk OVERRIDING SYSTEM VALUE VALUES (9, 65536, 67200, convert_to(substr(repeat('0123456789abcdef', 106), 1, 1664), 'UTF8'));
INSERT INTO readergroup.chunk OVERRIDING SYSTEM VALUE VALUES (10, 0, 4, '\x6c6f6e67');
INSERT INTO readergroup.chunk OVERRIDING SYSTEM VALUE VALUES (11, 0, 3, '\x6f6464');
INSERT INTO readergroup.attribute OVERRIDING SYSTEM VALUE VALUES (1, 'mark', '\x3237');
INSERT INTO readergroup.attribute OVERRIDING SYSTEM VALUE VALUES (3, 'a', '\x6161');
INSERT INTO readergroup.attribute OVERRIDING SYSTEM VALUE VALUES (3, 'b', '\x');
INSERT INTO readergroup.attribute OVERRIDING SYSTEM VALUE VALUES (3, 'c/1', '\x6331');
INSERT INTO readergroup.attribute OVERRIDING SYSTEM VALUE VALUES (3, 'shop/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/long/name', '\x6c6f6e67');
INSERT INTO readergroup.attribute OVERRIDING SYSTEM VALUE VALUES (3, 'shop/ä b.*>~%/', '\x6f6464');
INSERT INTO readergroup.attribute OVERRIDING SYSTEM VALUE VALUES (3, 'é', '\xc3a9');
INSERT INTO readergroup.attribute OVERRIDING SYSTEM VALUE VALUES (8, 'mark', '\x32');
INSERT INTO readergroup.store OVERRIDING SYSTEM VALUE VALUES (1);
SELECT setval('readergroup.segment_id_seq', 11);
