"""Which Arrow types hold text, and which hold messages: everything that becomes `str` or a list of objects in Python."""

import pyarrow as pa

_TEXT = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
_LISTS = (
    pa.types.is_list,
    pa.types.is_large_list,
    pa.types.is_fixed_size_list,
    pa.types.is_list_view,
    pa.types.is_large_list_view,
)


def is_text(column_type: pa.DataType) -> bool:
    """Text in any encoding, or a column of nothing but nulls."""
    if pa.types.is_dictionary(column_type):
        column_type = column_type.value_type
    return pa.types.is_null(column_type) or any(test(column_type) for test in _TEXT)


def is_messages(column_type: pa.DataType) -> bool:
    """A list of structs with a role and a content that are text; further fields and any order of them are fine; or nulls."""
    if pa.types.is_null(column_type):
        return True
    if not any(test(column_type) for test in _LISTS):
        return False
    message = column_type.value_type
    if pa.types.is_null(message):
        return True
    if not pa.types.is_struct(message):
        return False
    fields = {field.name: field.type for field in message}
    return {"role", "content"} <= fields.keys() and is_text(fields["role"]) and is_text(fields["content"])
