"""Makes the functions by which other programs schedule and cancel from SQL, on PostgreSQL.

The functions stand in the schema of the table of messages, and find the tables there whatever the ``search_path`` of
their caller is: so each set of tables has functions of its own, and no other schema can offer them another table. They
have the rights of their caller. A later version that changes what a row of a message needs makes them anew in a
migration of its own: ``tests/record/test_from_sql.py`` compares their columns with those of the insert.
"""

from __future__ import annotations

from typing import Any

from django.db import migrations, models

# The conditions of ``models/messages.py``, as the unique index of keys has them.
HOLDS_KEY = """(key IS NOT NULL AND next_id IS NULL AND (key_for IS NOT NULL OR
          ((key_deliveries IS NULL OR deliveries <= key_deliveries) AND state IN ('running', 'scheduled'))))"""
WAITS_AGAIN = """(deliveries = reported AND deliveries > key_deliveries AND key IS NOT NULL AND next_id IS NULL
          AND state = 'scheduled')"""

# Characters that a key has none of: what Python calls not printable, and a space at either end.
UNPRINTABLE = (
    r"[\u0001-\u001f\u007f-\u00a0\u00ad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u1680\u180e\u2000-\u200f"
    r"\u2028-\u202f\u205f-\u2064\u2066-\u206f\u3000\ue000-\uf8ff\ufeff\ufff9-\ufffb\U000110bd\U000110cd"
    r"\U00013430-\U00013438\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f"
    r"\U000f0000-\U0010ffff]|^ | $"
)

# Moves a message whose row the caller has locked, with its log: as ``record/sql/moves.py`` does.
MOVE = """
CREATE OR REPLACE FUNCTION {schema}.delayq_move(message_id bigint, to_state text, reason text) RETURNS void
LANGUAGE plpgsql SECURITY INVOKER SET search_path = {schema}, pg_temp AS $delayq$
#variable_conflict use_column
DECLARE
    moment timestamptz := clock_timestamp();
BEGIN
    INSERT INTO delayq_log (message_id, number, at, from_state, to_state, delivery, due_at, ready_at, actor, reason,
                            error, traceback, exception)
    SELECT id, 1, created_at, NULL, 'scheduled', 0, due_at, NULL, created_by, '', '', '', ''
      FROM delayq_message WHERE id = delayq_move.message_id AND created_by IS NOT NULL
     UNION ALL
    SELECT id, moves, claimed_at, 'scheduled', 'running', deliveries, due_at, ready_at,
           'worker:' || coalesce(claimed_by, worker), '', '', '', ''
      FROM delayq_message WHERE id = delayq_move.message_id AND claimed_at IS NOT NULL
     UNION ALL
    SELECT id, moves + 1, moment, state, delayq_move.to_state, deliveries, due_at, NULL, 'sql:' || current_user,
           delayq_move.reason, '', '', ''
      FROM delayq_message WHERE id = delayq_move.message_id;
    UPDATE delayq_message
       SET state = delayq_move.to_state, moves = moves + 1, created_by = NULL, claimed_at = NULL, ready_at = NULL,
           claimed_by = NULL, cancel_requested = cancel_requested OR delayq_move.to_state = 'running',
           finished_at = CASE WHEN delayq_move.to_state <> 'running' THEN moment END,
           leased_until = CASE WHEN delayq_move.to_state = 'running' THEN leased_until END,
           worker = CASE WHEN delayq_move.to_state = 'running' THEN worker ELSE '' END
     WHERE id = delayq_move.message_id;
END $delayq$
"""

SCHEDULE = """
CREATE OR REPLACE FUNCTION {schema}.delayq_schedule(
    topic text, payload jsonb DEFAULT 'null', delay interval DEFAULT NULL, due_at timestamptz DEFAULT NULL,
    queue text DEFAULT 'default', priority int DEFAULT 0, key text DEFAULT NULL, on_conflict text DEFAULT 'error',
    "unique" text DEFAULT 'live', expires interval DEFAULT NULL, max_attempts int DEFAULT NULL,
    retry jsonb DEFAULT NULL, timeout interval DEFAULT NULL, lease interval DEFAULT NULL, headers jsonb DEFAULT '{}',
    limit_key text DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql SECURITY INVOKER SET search_path = {schema}, pg_temp AS $delayq$
#variable_conflict use_column
DECLARE
    moment timestamptz := clock_timestamp();
    century interval := '36525 days';
    m delayq_message%ROWTYPE;
    other record;
    wrong text;
BEGIN
    m.payload := coalesce(payload, 'null');
    m.headers := coalesce(headers, '{}');
    m.priority := CASE WHEN priority BETWEEN -100 AND 100 THEN priority WHEN priority IS NULL THEN 0 END;
    m.max_attempts := CASE WHEN max_attempts BETWEEN 1 AND 10000 THEN max_attempts END;
    m.timeout := CASE WHEN timeout = interval '0' OR timeout BETWEEN interval '10 ms' AND interval '30 days'
                        THEN extract(epoch FROM timeout) END;
    m.lease := CASE WHEN lease BETWEEN interval '1 s' AND interval '1 day' THEN extract(epoch FROM lease) END;
    IF retry = 'false' THEN
        m.retry := '{"fixed": []}';
    ELSIF jsonb_typeof(retry) = 'array'
        AND NOT jsonb_path_exists(retry, 'strict $[*] ? (!(@.type() == "number" && @ >= 0 && @ <= 31622400))') THEN
        SELECT jsonb_build_object('fixed', coalesce(jsonb_agg(round(s, greatest(1, min_scale(s))) ORDER BY n), '[]'))
          INTO m.retry
          FROM (SELECT (d #>> '{}')::numeric, n FROM jsonb_array_elements(retry) WITH ORDINALITY r(d, n)) r(s, n);
    END IF;
    IF "unique" = 'scheduled' THEN
        m.key_deliveries := 0;
    ELSIF "unique" <> 'live' THEN
        BEGIN
            m.key_for := CASE WHEN "unique"::interval > interval '0' AND "unique"::interval <= century
                                THEN extract(epoch FROM "unique"::interval) END;
        EXCEPTION WHEN data_exception THEN
            m.key_for := NULL;
        END;
    END IF;
    -- In UTC, where each day has 24 hours.
    IF delay BETWEEN interval '0' AND century OR delay IS NULL THEN
        m.due_at := coalesce(due_at, (moment AT TIME ZONE 'UTC' + coalesce(delay, '0')) AT TIME ZONE 'UTC');
    END IF;
    IF m.due_at BETWEEN moment - interval '60 s' AND (moment AT TIME ZONE 'UTC' + century) AT TIME ZONE 'UTC' THEN
        m.due_at := date_bin('100 us', m.due_at + interval '99 us', timestamptz '2000-01-01 00:00:00Z');
        IF expires > interval '0' AND expires <= century THEN
            m.expires_at := (m.due_at AT TIME ZONE 'UTC' + expires) AT TIME ZONE 'UTC';
        END IF;
    ELSE
        m.due_at := NULL;
    END IF;
    wrong := CASE
        WHEN topic !~ '^[A-Za-z0-9][A-Za-z0-9_.:/-]*$' OR length(topic) > 100 OR topic IS NULL THEN
            'topic must be 1 to 100 of the characters A-Z a-z 0-9 _ . : / - and begin with a letter or digit, not '
            || quote_nullable(left(topic, 40))
        WHEN queue !~ '^[A-Za-z0-9][A-Za-z0-9_.-]*$' OR length(queue) > 64 THEN
            'queue must be 1 to 64 of the characters A-Z a-z 0-9 _ . - and begin with a letter or digit, not '
            || quote_nullable(left(queue, 40))
        WHEN key = '' OR length(key) > 200 OR key ~ '{unprintable}' THEN
            'key must be 1 to 200 printable characters without a space at either end, not '
            || quote_nullable(left(key, 40))
        WHEN limit_key = '' OR length(limit_key) > 200 OR limit_key ~ '{unprintable}' THEN
            'limit_key must be 1 to 200 printable characters without a space at either end, not '
            || quote_nullable(left(limit_key, 40))
        WHEN m.priority IS NULL THEN 'priority must be a whole number from -100 to 100, not ' || priority
        WHEN delay IS NOT NULL AND due_at IS NOT NULL THEN 'give delay or due_at, not both'
        WHEN m.due_at IS NULL AND due_at IS NULL THEN 'delay must be between 0 and 100 years, not ' || delay
        WHEN m.due_at IS NULL AND due_at < moment THEN 'due_at is in the past: ' || due_at
        WHEN m.due_at IS NULL THEN 'due_at is more than 100 years ahead: ' || due_at
        WHEN expires IS NOT NULL AND m.expires_at IS NULL THEN
            'expires must be more than 0 and at most 100 years, not ' || expires
        WHEN max_attempts IS NOT NULL AND m.max_attempts IS NULL THEN
            'max_attempts must be a whole number from 1 to 10000, not ' || max_attempts
        WHEN timeout IS NOT NULL AND m.timeout IS NULL THEN
            'timeout must be between 10 ms and 30 days, or 0 for none, not ' || timeout
        WHEN lease IS NOT NULL AND m.lease IS NULL THEN 'lease must be between 1 second and 1 day, not ' || lease
        WHEN retry IS NOT NULL AND m.retry IS NULL THEN
            'retry must be an array of delays in seconds, each between 0 and 366 days, or false for never'
        WHEN coalesce(on_conflict, '') NOT IN ('error', 'keep') THEN
            'on_conflict is one of error, keep, not ' || quote_nullable(left(on_conflict, 40))
        WHEN coalesce("unique", '') NOT IN ('live', 'scheduled') AND m.key_for IS NULL THEN
            'unique must be live, scheduled, or more than 0 and at most 100 years, not '
            || quote_nullable(left("unique", 40))
        WHEN key IS NULL AND on_conflict <> 'error' THEN
            'on_conflict needs a key: without one no message conflicts with another'
        WHEN key IS NULL AND "unique" <> 'live' THEN 'unique needs a key: without one there is nothing to hold'
        WHEN octet_length(m.payload::text) > 262144 THEN 'payload has more than 262144 bytes of JSON'
        WHEN jsonb_path_exists(m.payload, 'strict $.**{64} ? (@.type() == "object" || @.type() == "array")') THEN
            'payload is nested too deep'
        WHEN jsonb_typeof(m.headers) <> 'object' THEN 'headers must be an object'
        WHEN octet_length(m.headers::text) > 16384 THEN 'headers have more than 16384 bytes of JSON'
        WHEN jsonb_path_exists(m.headers, 'strict $.**{4} ? (@.type() == "object" || @.type() == "array")') THEN
            'headers are nested too deep'
        WHEN jsonb_path_exists(jsonb_build_array(m.payload, m.headers),
            'strict $.** ? (@.type() == "number" && (@ >= 9223372036854775808 || @ < -9223372036854775808))') THEN
            'payload or headers hold a number of more than 64 bits: send it as a string'
    END;
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'delayq_schedule: ' || wrong;
    END IF;
    m.topic := topic;
    m.queue := coalesce(queue, 'default');
    m.key := key;
    m.limit_key := limit_key;
    -- Between the refused insert and the look for the message in its way, that one may move: then the key may be free.
    FOR i IN 1..20 LOOP
        INSERT INTO delayq_message (
            topic, queue, key, priority, payload, headers, due_at, expires_at, created_at, created_by, retry,
            max_attempts, timeout, lease, limit_key, key_for, key_deliveries, state, attempts, deliveries, reported,
            excused, moves, worker, cancel_requested)
        SELECT m.topic, m.queue, m.key, m.priority, m.payload, m.headers, m.due_at, m.expires_at, moment,
               'sql:' || current_user, m.retry, m.max_attempts, m.timeout, m.lease, m.limit_key, m.key_for,
               m.key_deliveries, 'scheduled', 0, 0, 0, 0, 1, '', false
         WHERE m.key IS NULL OR NOT EXISTS (
            SELECT FROM delayq_message WHERE topic = m.topic AND key = m.key AND {waits_again})
            ON CONFLICT (topic, key) WHERE {holds_key} DO NOTHING
        RETURNING id INTO m.id;
        IF FOUND THEN
            INSERT INTO delayq_unannounced (message_id, at) VALUES (m.id, moment);
            RETURN m.id;
        END IF;
        SELECT id, state, moves, finished_at, key_for, expires_at INTO other FROM delayq_message
         WHERE topic = m.topic AND key = m.key AND ({holds_key} OR {waits_again}) ORDER BY {holds_key} DESC LIMIT 1;
        IF NOT FOUND THEN
            CONTINUE;
        ELSIF other.finished_at + other.key_for * interval '1 s' <= clock_timestamp() THEN
            UPDATE delayq_message SET key_for = NULL WHERE id = other.id AND moves = other.moves;
            CONTINUE;
        ELSIF other.state = 'scheduled' AND other.expires_at <= clock_timestamp() THEN
            PERFORM FROM delayq_message WHERE id = other.id AND moves = other.moves FOR NO KEY UPDATE SKIP LOCKED;
            IF FOUND THEN
                PERFORM delayq_move(other.id, 'expired', 'not started in time');
                CONTINUE;
            END IF;
        END IF;
        IF on_conflict = 'error' THEN
            RAISE EXCEPTION USING ERRCODE = 'unique_violation', CONSTRAINT = 'delayq_held_key',
                MESSAGE = format('delayq_schedule: message %s of topic %L has this key', other.id, topic);
        ELSIF m.key_deliveries IS NULL OR other.state <> 'scheduled' THEN
            RETURN other.id;
        END IF;
        -- The message does not begin before this transaction ends: its handler is to see what that writes.
        PERFORM FROM delayq_message WHERE id = other.id AND state = 'scheduled' AND ({holds_key} OR {waits_again})
            FOR SHARE;
        IF FOUND THEN
            INSERT INTO delayq_unannounced (message_id, at) VALUES (other.id, moment) ON CONFLICT DO NOTHING;
            RETURN other.id;
        END IF;
    END LOOP;
    RAISE EXCEPTION USING ERRCODE = 'unique_violation', CONSTRAINT = 'delayq_held_key',
        MESSAGE = format('delayq_schedule: the key of topic %L changes hands too quickly', topic);
END $delayq$
"""

CANCEL = """
CREATE OR REPLACE FUNCTION {schema}.delayq_cancel(
    id bigint DEFAULT NULL, topic text DEFAULT NULL, key text DEFAULT NULL, reason text DEFAULT ''
) RETURNS text
LANGUAGE plpgsql SECURITY INVOKER SET search_path = {schema}, pg_temp AS $delayq$
#variable_conflict use_column
DECLARE
    meant record;
    m record;
BEGIN
    IF (id IS NULL) = (topic IS NULL) OR (topic IS NULL) <> (key IS NULL) THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = 'delayq_cancel: name the message by its id, or by topic and key';
    END IF;
    FOR i IN 1..20 LOOP
        IF delayq_cancel.id IS NOT NULL THEN
            SELECT id, next_id INTO meant FROM delayq_message WHERE id = delayq_cancel.id;
        ELSE
            SELECT id, next_id INTO meant FROM delayq_message
             WHERE topic = delayq_cancel.topic AND key = delayq_cancel.key AND state IN ('running', 'scheduled')
             ORDER BY {holds_key} DESC, next_id IS NULL DESC, id DESC LIMIT 1;
        END IF;
        IF NOT FOUND THEN
            RETURN 'not found';
        END IF;
        -- One that has handed its key over meanwhile is not the one that the key means now.
        SELECT id, state, deliveries, reported, cancel_requested INTO m FROM delayq_message
         WHERE id = meant.id AND (delayq_cancel.id IS NOT NULL OR next_id IS NOT DISTINCT FROM meant.next_id)
           FOR NO KEY UPDATE;
        EXIT WHEN FOUND;
    END LOOP;
    IF m.state = 'scheduled' THEN
        PERFORM delayq_move(m.id, 'cancelled', coalesce(reason, ''));
        RETURN CASE WHEN m.deliveries > m.reported THEN 'outcome unknown' ELSE 'cancelled' END;
    ELSIF m.state IS DISTINCT FROM 'running' THEN
        RETURN 'too late: ' || coalesce(m.state, 'running');
    ELSIF NOT m.cancel_requested THEN
        PERFORM delayq_move(m.id, 'running', coalesce(nullif(reason, ''), 'cancel requested'));
    END IF;
    RETURN 'requested';
END $delayq$
"""


def make(apps: Any, schema_editor: Any) -> None:
    """Make the functions in the schema of the tables, where this database has them."""
    if schema_editor.connection.vendor != "postgresql":
        return
    with schema_editor.connection.cursor() as cursor:
        cursor.execute(
            "SELECT quote_ident(nspname) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE c.oid = to_regclass('delayq_message')"
        )
        schemas = [schema for (schema,) in cursor.fetchall()]
    # A router may keep the tables elsewhere.
    for schema in schemas:
        for function in (MOVE, SCHEDULE, CANCEL):
            text = function.replace("{holds_key}", HOLDS_KEY).replace("{waits_again}", WAITS_AGAIN)
            text = text.replace("{unprintable}", UNPRINTABLE).replace("{schema}", schema)
            schema_editor.execute(text, params=None)


def drop(apps: Any, schema_editor: Any) -> None:
    """Drop the functions."""
    if schema_editor.connection.vendor == "postgresql":
        for name in ("delayq_cancel", "delayq_schedule", "delayq_move"):
            schema_editor.execute(f"DROP FUNCTION IF EXISTS {name}")


class Migration(migrations.Migration):
    dependencies = [("delayq", "0002_fewer_checks")]

    operations = [
        migrations.CreateModel(
            name="Unannounced",
            fields=[
                ("message_id", models.BigIntegerField(primary_key=True, serialize=False)),
                ("at", models.DateTimeField()),
            ],
            options={"db_table": "delayq_unannounced", "default_permissions": ()},
        ),
        migrations.RunPython(make, drop),
    ]
