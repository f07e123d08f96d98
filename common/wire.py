"""Step messages ↔ protobuf, as both streams carry them. Pure functions; with its neighbours wire_*.py the only code
that knows both forms.

Decoding checks form only (column lengths, enum values, packed sizes) and raises ProtocolError naming the field; whether
a plan makes sense is the executor's question, whether a result does the scheduler's.
"""

from common import messages as m
from common.errors import ProtocolError
from common.wire_handshake import decode_hello, decode_welcome, encode_hello, encode_welcome
from common.wire_plan import decode_plan, encode_plan
from common.wire_result import decode_plan_error, decode_result, encode_plan_error, encode_result
from stepwire.executor.v1 import executor_pb2 as pb


def encode_to_executor(message: m.ToExecutor) -> pb.ToExecutor:
    match message:
        case m.StepPlan():
            p = pb.ToExecutor()
            encode_plan(message, p.plan)
            return p
        case m.Ping():
            return pb.ToExecutor(ping=pb.Ping(id=message.id, sent_ns=message.sent_ns))
        case m.Hello():
            return pb.ToExecutor(hello=encode_hello(message))


def decode_to_executor(p: pb.ToExecutor) -> m.ToExecutor:
    match p.WhichOneof("message"):
        case "plan":
            return decode_plan(p.plan)
        case "ping":
            return m.Ping(p.ping.id, p.ping.sent_ns)
        case "hello":
            return decode_hello(p.hello)
        case _:
            raise ProtocolError("message: empty or unknown", field="message")


def encode_from_executor(message: m.FromExecutor) -> pb.FromExecutor:
    match message:
        case m.StepResult():
            return pb.FromExecutor(result=encode_result(message))
        case m.Pong():
            return pb.FromExecutor(
                pong=pb.Pong(
                    id=message.id,
                    ping_sent_ns=message.ping_sent_ns,
                    received_ns=message.received_ns,
                    sent_ns=message.sent_ns,
                )
            )
        case m.PlanError():
            return pb.FromExecutor(plan_error=encode_plan_error(message))
        case m.Welcome():
            return pb.FromExecutor(welcome=encode_welcome(message))
        case m.Draining():
            return pb.FromExecutor(draining=pb.Draining(reason=message.reason, deadline_ms=message.deadline_ms))


def decode_from_executor(p: pb.FromExecutor) -> m.FromExecutor:
    match p.WhichOneof("message"):
        case "result":
            return decode_result(p.result)
        case "pong":
            return m.Pong(p.pong.id, p.pong.ping_sent_ns, p.pong.received_ns, p.pong.sent_ns)
        case "plan_error":
            return decode_plan_error(p.plan_error)
        case "welcome":
            return decode_welcome(p.welcome)
        case "draining":
            return m.Draining(p.draining.reason, p.draining.deadline_ms)
        case _:
            raise ProtocolError("message: empty or unknown", field="message")
