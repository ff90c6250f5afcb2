"""The published formats of tool calls: a row a format.

answer   text  begins opens  call separator call  closes ends  (more groups, if a group has one call)
hermes         <tool_call>   {"name": ...}               </tool_call>
mistral        [TOOL_CALLS] [  {...}  ,  {...}  ]

Which row a model has, its chat template tells (`router/tools/detect.py`); how it writes thoughts, `reasoning.py`.
"""

from __future__ import annotations

from router.tools.calls.brace_calls import BraceCalls
from router.tools.calls.channels import HARMONY, RECIPIENTS, ChannelCalls
from router.tools.calls.format_row import CallIds, ToolFormat, functions, in_list, invokes, key_values
from router.tools.calls.json_calls import JsonCalls, NamedJsonCalls
from router.tools.calls.python_calls import PythonCalls
from router.tools.calls.tagged_calls import TaggedCalls, invoke_calls

IS_STRING = {"string": ' string="true"', "": ' string="false"'}
DEEPSEEK_BEGINS = ("<｜tool▁calls▁begin｜>", "<｜tool_calls_begin｜>", "<｜tool calls begin｜>")
FORMATS = (
    ToolFormat(
        "mistral_args",
        NamedJsonCalls(between="[ARGS]", id_mark="[CALL_ID]"),
        begins=("[TOOL_CALLS]",),
        signs=(("[TOOL_CALLS]", "[ARGS]"),),
        ids=CallIds.SHORT,
    ),
    in_list("mistral", JsonCalls("arguments"), ("[TOOL_CALLS]",), signs=(("[TOOL_CALLS]",),), ids=CallIds.SHORT),
    in_list("granite", JsonCalls("arguments"), ("<|tool_call|>",), signs=(("<|tool_call|>", "JSON list"),)),
    in_list(
        "phi4",
        JsonCalls("arguments"),
        ("<|tool_call|>", "functools"),
        ("<|/tool_call|>",),
        (("<|/tool_call|>",), ("<|tool|>", "<|/tool|>")),
    ),
    in_list("apriel", JsonCalls("arguments"), ("<tool_calls>",), ("</tool_calls>",), (("<tool_calls>[",),)),
    in_list("nemotron", JsonCalls("arguments"), ("<TOOLCALL>",), ("</TOOLCALL>",)),
    in_list(
        "apertus",
        NamedJsonCalls(before=('{"',), between='": ', after="}"),
        ("<|tools_prefix|>",),
        ("<|tools_suffix|>",),
    ),
    in_list(
        "command",
        JsonCalls("parameters", name="tool_name", number="tool_call_id"),
        ("<|START_ACTION|>",),
        ("<|END_ACTION|>",),
        frames=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    in_list(
        "command_actions",
        JsonCalls("parameters", name="tool_name"),
        ("Action:\n```json\n", "Action: ```json\n", "Action:```json\n"),
        ("```",),
    ),
    ToolFormat("minimax_m1", JsonCalls("arguments"), begins=("<tool_calls>",), separator="", ends=("</tool_calls>",)),
    ToolFormat(
        "kimi_k2",
        NamedJsonCalls(
            before=("<|tool_call_begin|>functions.",),
            number=":",
            between="<|tool_call_argument_begin|>",
            after="<|tool_call_end|>",
        ),
        begins=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
        signs=(("<|tool_calls_section_begin|>",),),
        separator="",
        ends=("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
        ids=CallIds.NAMED,
    ),
    ToolFormat(
        "kimi_k3",
        TaggedCalls(
            opens='<|open|>call tool="',
            named=('"', "<|sep|>"),
            call_attribute=' index="[0-9]{1,3}"',
            key='<|open|>argument key="',
            keyed=('"', "<|sep|>"),
            type_texts={
                "string": ' type="string"',
                "integer": ' type="number"',
                "number": ' type="number"',
                "boolean": ' type="boolean"',
                "array": ' type="array"',
                "object": ' type="object"',
                "null": ' type="null"',
            },
            value_ends="<|close|>argument<|sep|>",
            ends="<|close|>call<|sep|>",
            left_at=("<|close|>tools<|sep|>",),
        ),
        begins=("<|open|>tools<|sep|>",),
        separator="",
        ends=("<|close|>tools<|sep|>",),
        frames=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    ToolFormat(
        "deepseek_v3",
        NamedJsonCalls(
            before=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>",),
            between="\n```json\n",
            after="\n```<｜tool▁call▁end｜>",
        ),
        begins=DEEPSEEK_BEGINS,
        signs=(("<｜tool▁calls▁begin｜>", "```json"),),
        separator="",
        ends=("<｜tool▁calls▁end｜>",),
    ),
    ToolFormat(
        "deepseek_v31",
        NamedJsonCalls(before=("<｜tool▁call▁begin｜>",), between="<｜tool▁sep｜>", after="<｜tool▁call▁end｜>"),
        begins=DEEPSEEK_BEGINS,
        separator="",
        ends=("<｜tool▁calls▁end｜>",),
    ),
    invokes(
        "deepseek_v32",
        "<｜DSML｜function_calls>",
        "</｜DSML｜function_calls>",
        "｜DSML｜",
        type_texts=IS_STRING,
    ),
    invokes(
        "deepseek_v4",
        "<｜DSML｜tool_calls>",
        "</｜DSML｜tool_calls>",
        "｜DSML｜",
        type_texts=IS_STRING,
    ),
    invokes("minimax_m2", "<minimax:tool_call>", "</minimax:tool_call>"),
    ToolFormat(
        "minimax_m3",
        TaggedCalls(
            opens=']<]minimax[>[<invoke name="',
            named=('"', ">"),
            key="]<]minimax[>[<",
            keyed=(">",),
            value_ends="]<]minimax[>[</{key}>",
            ends="]<]minimax[>[</invoke>",
            left_at=("]<]minimax[>[</tool_call>",),
            nests=True,
        ),
        begins=("]<]minimax[>[<tool_call>",),
        separator="",
        ends=("]<]minimax[>[</tool_call>",),
    ),
    invokes("dots", "<dots_function_call>", "</dots_function_call>"),
    ToolFormat(
        "step3",
        invoke_calls(
            "steptml:",
            "<｜tool_calls_end｜>",
            opens="<｜tool_call_begin｜>function<｜tool_sep｜>",
            ends="<｜tool_call_end｜>",
        ),
        begins=("<｜tool_calls_begin｜>",),
        signs=(("<｜tool_calls_begin｜>", "steptml"),),
        separator="",
        ends=("<｜tool_calls_end｜>",),
    ),
    ToolFormat(
        "minicpm5",
        TaggedCalls(
            named=('"', ">"),
            key='<param name="',
            keyed=('"', ">"),
            value_ends="</param>",
            ends="</function>",
            has_cdata=True,
        ),
        begins=('<function name="',),
    ),
    functions("seed_oss", "<seed:tool_call>", "</seed:tool_call>", padding=""),
    functions("qwen3_coder", "<tool_call>", "</tool_call>", padding="\n"),
    key_values("glm", "<tool_call>", "</tool_call>"),
    key_values("hunyuan", "<tool_call>", "</tool_call>", group=("<tool_calls>", "</tool_calls>")),
    key_values(
        "hunyuan_opensource",
        "<tool_call:opensource>",
        "</tool_call:opensource>",
        suffix=":opensource",
        group=("<tool_calls:opensource>", "</tool_calls:opensource>"),
    ),
    key_values("iquest", "<iquest_tool_call>", "</iquest_tool_call>"),
    key_values("longcat_keys", "<longcat_tool_call>", "</longcat_tool_call>", prefix="longcat_"),
    ToolFormat(
        "longcat",
        JsonCalls("arguments"),
        begins=("<longcat_tool_call>",),
        signs=(("<longcat_tool_call>",),),
        ends=("</longcat_tool_call>",),
    ),
    ToolFormat(
        "hermes",
        JsonCalls("arguments"),
        begins=("<tool_call>",),
        signs=(("<tool_call>", '{"name"', "arguments"), ("<tool_call>", '{\\"name\\"', "arguments")),
        ends=("</tool_call>",),
    ),
    ToolFormat(
        "gemma4",
        BraceCalls(opens="call:", quote='<|"|>'),
        begins=("<|tool_call>",),
        signs=(("<|tool_call>", "call:"),),
        ends=("<tool_call|>",),
    ),
    ToolFormat(
        "function_gemma",
        BraceCalls(opens="call:", quote="<escape>"),
        begins=("<start_function_call>",),
        signs=(("<start_function_call>",),),
        ends=("<end_function_call>",),
    ),
    ToolFormat(
        "gigachat3",
        JsonCalls("arguments"),
        begins=("<|message_sep|>\n\nfunction call<|role_sep|>\n", "function call<|role_sep|>\n"),
    ),
    ToolFormat("function_call", JsonCalls("arguments"), begins=("<function_call>",)),
    ToolFormat("gigachat31", JsonCalls("arguments"), begins=("<|function_call|>",)),
    ToolFormat(
        "internlm",
        JsonCalls("parameters"),
        begins=("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"),
        signs=(("<|action_start|>", "<|plugin|>"),),
        ends=("<|action_end|>",),
    ),
    ToolFormat(
        "solar",
        NamedJsonCalls(
            before=("<|tool_call:begin|>", "<|tool_call:name|>"),
            between="<|tool_call:args|>",
            after="<|tool_call:end|>",
        ),
        begins=("<|tool_calls|>", "<|begin|>assistant<|tool_calls|>"),
        separator="",
        ends=("<|calls|>",),
        frames=("<|begin|>assistant", "<|content|>", "<|end|>"),
    ),
    in_list(
        "lfm2",
        PythonCalls(),
        ("<|tool_call_start|>",),
        ("<|tool_call_end|>",),
        (("<|tool_call_start|>",), ("<|tool_list_start|>",)),
    ),
    ToolFormat(
        "olmo3",
        PythonCalls(),
        begins=("<function_calls>",),
        signs=(("<function_calls>", "<functions>"),),
        separator="",
        ends=("</function_calls>",),
    ),
    in_list(
        "pythonic",
        PythonCalls(),
        ("<|python_start|>",),
        ("<|python_end|>",),
        (("[func_name1(",), ("[func_name(",)),
        may_begin_bare=True,
    ),
    ToolFormat("functionary", NamedJsonCalls(between=">", after="</function>"), begins=("<function=",)),
    ToolFormat(
        "functionary_v32",
        NamedJsonCalls(between="\n"),
        begins=(">>>",),
        signs=((">>>all\\n", ">>>"),),
        may_begin_bare=True,
        frames=(">>>all\n",),
        first_frame="all\n",
    ),
    ToolFormat(
        "glm4",
        NamedJsonCalls(between="\n"),
        begins=("<|assistant|>",),
        signs=(("<|assistant|>", "<|observation|>", "[gMASK]"),),
        may_begin_bare=True,
    ),
    ToolFormat("harmony", ChannelCalls(HARMONY), begins=()),
    ToolFormat("recipients", ChannelCalls(RECIPIENTS), begins=()),
    in_list("xlam", JsonCalls("arguments"), ("[TOOL_CALLS]",), may_begin_bare=True),
    ToolFormat(
        "llama3_json",
        JsonCalls("parameters"),
        begins=("<|python_tag|>", "<|python_start|>"),
        signs=(
            ('{"name": function name, "parameters"',),
            ("<|python_tag|>", '"parameters": '),
            ("<|python_start|>", '"parameters": '),
        ),
        may_begin_bare=True,
        separator=";",
        ends=("<|python_end|>",),
    ),
)
BY_NAME = {row.name: row for row in FORMATS}
