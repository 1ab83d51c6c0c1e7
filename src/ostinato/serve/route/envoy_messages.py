"""Messages of Envoy's external processing (`envoy.service.ext_proc.v3`), as far as an endpoint picker needs them.

Names, numbers and types of the fields are those of the public protocol. No package ships them without replacing files
of others: xds-protos has modules of OpenTelemetry's, in an older version. Imported only where grpcio is installed.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2  # type: ignore[import-untyped]

PACKAGE = "ostinato.ext_proc"
"""Package of the messages in this process; on the wire, names do not matter."""

MESSAGES = {
    "HeaderValue": "key:1:string value:2:string raw_value:3:bytes",
    "HeaderMap": "headers:1:HeaderValue*",
    "HeaderValueOption": "header:1:HeaderValue append_action:3:int32",
    "HeaderMutation": "set_headers:1:HeaderValueOption* remove_headers:2:string*",
    "StreamedBodyResponse": "body:1:bytes end_of_stream:2:bool",
    "BodyMutation": "body:1:bytes clear_body:2:bool streamed_response:3:StreamedBodyResponse",
    "CommonResponse": "status:1:int32 header_mutation:2:HeaderMutation body_mutation:3:BodyMutation"
    " clear_route_cache:5:bool",
    "HttpHeaders": "headers:1:HeaderMap end_of_stream:3:bool",
    "HttpBody": "body:1:bytes end_of_stream:2:bool",
    "HttpTrailers": "trailers:1:HeaderMap",
    "FilterMetadataEntry": "key:1:string value:2:Struct",
    "Metadata": "filter_metadata:1:FilterMetadataEntry*",
    "ProtocolConfiguration": "request_body_mode:1:int32 response_body_mode:2:int32",
    "ProcessingRequest": "request_headers:2:HttpHeaders response_headers:3:HttpHeaders request_body:4:HttpBody"
    " response_body:5:HttpBody request_trailers:6:HttpTrailers response_trailers:7:HttpTrailers"
    " metadata_context:8:Metadata protocol_config:11:ProtocolConfiguration",
    "HeadersResponse": "response:1:CommonResponse",
    "BodyResponse": "response:1:CommonResponse",
    "TrailersResponse": "header_mutation:1:HeaderMutation",
    "HttpStatus": "code:1:int32",
    "ImmediateResponse": "status:1:HttpStatus headers:2:HeaderMutation body:3:bytes",
    "ProcessingResponse": "request_headers:1:HeadersResponse response_headers:2:HeadersResponse"
    " request_body:3:BodyResponse response_body:4:BodyResponse request_trailers:5:TrailersResponse"
    " response_trailers:6:TrailersResponse immediate_response:7:ImmediateResponse dynamic_metadata:8:Struct",
}
"""Fields of each message: name, number and type; `*` for those that repeat. Enumerations are int32."""
ONEOFS = {
    "ProcessingRequest": ("request", range(2, 8)),
    "ProcessingResponse": ("response", range(1, 8)),
    "BodyMutation": ("mutation", range(1, 4)),
}
"""Message -> name of its oneof, and the numbers of the fields in it."""

NONE, STREAMED, BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX_STREAMED = range(5)
"""Ways in which Envoy sends a body."""
OVERWRITE_IF_EXISTS_OR_ADD = 2
"""Value of a header option's append_action."""


def _make() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="ostinato/ext_proc.proto", package=PACKAGE, syntax="proto3")
    file.dependency.append(struct_pb2.DESCRIPTOR.name)
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        oneof, numbers = ONEOFS.get(name, ("", range(0)))
        if oneof:
            message.oneof_decl.add(name=oneof)
        for text in fields.split():
            field_name, number, kind = text.split(":")
            field = message.field.add(name=field_name, number=int(number), label=kinds.LABEL_OPTIONAL)
            if kind.endswith("*"):
                field.label = kinds.LABEL_REPEATED
            kind = kind.rstrip("*")
            if kind[0].isupper():
                field.type = kinds.TYPE_MESSAGE
                field.type_name = ".google.protobuf.Struct" if kind == "Struct" else f".{PACKAGE}.{kind}"
            else:
                field.type = kinds.Type.Value(f"TYPE_{kind.upper()}")
            if field.number in numbers:
                field.oneof_index = 0
    entry = next(message for message in file.message_type if message.name == "FilterMetadataEntry")
    metadata = next(message for message in file.message_type if message.name == "Metadata")
    entry.options.map_entry = True
    metadata.nested_type.add().CopyFrom(entry)
    file.message_type.remove(entry)
    metadata.field[0].type_name = f".{PACKAGE}.Metadata.FilterMetadataEntry"
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    of_file = pool.FindFileByName(file.name).message_types_by_name
    return {name: message_factory.GetMessageClass(of_file[name]) for name in of_file}


_MADE = _make()
ProcessingRequest = _MADE["ProcessingRequest"]
ProcessingResponse = _MADE["ProcessingResponse"]
HeadersResponse = _MADE["HeadersResponse"]
BodyResponse = _MADE["BodyResponse"]
TrailersResponse = _MADE["TrailersResponse"]
