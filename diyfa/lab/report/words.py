"""The texts of the report, each in English and Chinese."""

from __future__ import annotations

from typing import Any

LANGUAGES = ("en", "zh")

WORDS: dict[str, tuple[str, str]] = {
    # page
    "title": ("diyfa: how fast, on which device", "diyfa：在各设备上有多快"),
    "made": ("Made by diyfa {version} on {date}. Result files: {files}.", "由 diyfa {version} 于 {date} 生成。结果文件：{files} 个。"),
    "left_out": ("{rows} rows of ablations, trials, tile searches and earlier code are left out; `--all` lists them.", "消融、试验、分块搜索与旧代码的 {rows} 行未列入；用 `--all` 列出。"),
    "older": ("{rows} older figures of the same points are left out: the newest counts.", "相同测点的 {rows} 个较旧数据未列入：以最新者为准。"),
    "language": ("中文", "English"),
    "theme": ("Light / dark", "浅色 / 深色"),
    "device": ("device", "设备"), "pass": ("pass", "方向"), "implementations": ("implementations", "实现"),
    "forward": ("forward", "前向"), "backward": ("backward", "反向"),
    "fwd": ("fwd", "前向"), "bwd": ("bwd", "反向"),
    "forward and backward": ("forward and backward", "前向与反向"),
    "causal": ("causal", "因果"), "full": ("full", "无掩码"), "all": ("all", "全部"),
    "measured": ("measured", "实测"), "predicted": ("predicted", "预测"),
    "nothing": ("The files have no such rows for {device}.", "这些文件中没有 {device} 的此类数据。"),
    # sections
    "throughput": ("Throughput against length", "吞吐量与序列长度"),
    "throughput_about": (
        "TFLOP/s of a pass of attention, one panel for each head dim D and mask. They count 4·B·H·Sq·Sk·D for the forward pass, half of it when causal, 2.5 times for the backward pass. Every figure is the newest in the files; the tooltip has its date.",
        "注意力单次前向或反向的 TFLOP/s，每个头维度 D 与掩码一幅图。前向按 4·B·H·Sq·Sk·D 计，因果掩码减半，反向乘 2.5。每个数据取文件中最新的一次，提示框中有日期。"),
    "ratio": ("Ratio to the best peer", "与最快同类实现之比"),
    "ratio_about": (
        "diyfa's speed divided by that of the fastest other implementation. Above 1 diyfa is faster. Both figures are of one file, so of one device with the same versions; each peer is compared in the newest file that has both.",
        "diyfa 的速度除以其他实现中最快者的速度，大于 1 表示 diyfa 更快。两个数据取自同一文件，即同一设备、同样的版本；每个实现取同时含有两者的最新文件。"),
    "models": ("Shapes from models", "来自模型的形状"),
    "roofline": ("Roofline", "屋顶线"),
    "roofline_about": (
        "Solid lines are ceilings that were measured on the device: a matrix product and plain reads. Dotted lines are the data sheet's. The intensity counts each input and output once: q, k, v and the output, in the backward pass with their gradients; over a KV cache the keys and values.",
        "实线是在该设备上实测的上限：矩阵乘与单纯读取；虚线取自数据手册。计算强度中每个输入与输出只计一次：q、k、v 与输出，反向再加各自的梯度；KV 缓存上计键与值。"),
    "no_ceiling": ("No ceiling was measured on {device}: only the data sheet's lines are drawn.", "{device} 没有实测上限：只画数据手册的线。"),
    "memory": ("Memory", "内存"),
    "memory_about": ("Peak memory that one call allocates beyond its inputs, MiB.", "一次调用在输入之外分配的峰值内存，MiB。"),
    "decoding": ("Decoding", "解码"),
    "decoding_about": (
        "Attention of new tokens over a KV cache: bytes of keys and values read in a second, as a share of {ceiling}.",
        "新 token 对 KV 缓存的注意力：每秒读取的键与值字节数，占{ceiling}的比例。"),
    "read_measured": ("what plain reads reach on this device ({value} GB/s, measured)", "本设备单纯读取带宽（实测 {value} GB/s）"),
    "read_nominal": ("the data sheet's bandwidth ({value} GB/s): the files have no measured one", "数据手册带宽（{value} GB/s）：文件中没有实测值"),
    "beside": ("cuda beside npu", "cuda 与 npu 并列"),
    "beside_about": (
        "The forward pass as a share of each chip's 16-bit peak, near 8192 tokens. Plain bars are measured. Hatched bars marked P are predictions of a cost model for Ascend chips: nothing ran on them.",
        "前向占各芯片 16 位峰值的比例，长度在 8192 附近。实心柱为实测；带斜线并标 P 的柱是代价模型对昇腾芯片的预测，没有在芯片上运行。"),
    "tables": ("All figures", "全部数据"),
    "tables_about": (
        "A click on a heading sorts, the fields below it filter. Figures whose spread exceeds {limit} are marked with ~. A hyphen in the column of spreads: the file does not say.",
        "点击表头排序，表头下的输入框筛选。离散度超过 {limit} 的数据标有 ~。离散度栏为短横：文件未记录。"),
    "download": ("Download CSV", "下载 CSV"),
    "devices": ("Devices", "设备"),
    "dates": ("measured", "测试日期"), "dates_predicted": ("predicted", "预测日期"), "versions": ("versions", "版本"), "clocks": ("clocks", "时钟"),
    "not_recorded": ("not recorded", "未记录"), "rows": ("rows", "行数"),
    "peak": ("data sheet", "数据手册"), "ceilings": ("measured ceilings", "实测上限"),
    "npu_peak": ("16-bit peak: see the cost model", "16 位峰值：见代价模型"),
    "length": ("sequence length", "序列长度"), "share": ("share", "比例"), "share_of_peak": ("share of the chip's peak", "占芯片峰值的比例"),
    "share_of_reads": ("share of the read bandwidth", "占读带宽的比例"), "intensity": ("FLOP for each byte", "每字节 FLOP"),
    "as_measured_with": ("compared with", "对比"), "spread": ("spread", "离散度"), "of": ("of", "，"),
    "product_ceiling": ("{name}: {value} TFLOP/s", "{name}：{value} TFLOP/s"), "read_ceiling": ("{name}: {value} GB/s", "{name}：{value} GB/s"),
    "plain reads": ("plain reads", "单纯读取"), "decode": ("one new token", "单个新 token"), "paged": ("pages", "分页缓存"),
    "ragged": ("ragged lengths", "长短不一"), "mla": ("latent cache (MLA)", "潜缓存（MLA）"), "mode": ("batch-invariant", "批次不变模式"),
    "tiny": ("1024 keys", "1024 个键"),
    # sentences of the first screen
    "stands": (
        "{direction}: as fast as the best of {peers} or faster at {wins} of {points} points; median {median}, from {low} to {high}.",
        "{direction}：{points} 个测点中有 {wins} 个不慢于 {peers} 中最快者；比值中位数 {median}，范围 {low} 至 {high}。"),
    "stands_alone": ("{direction}: up to {best} TFLOP/s; the files have no peer beside it.", "{direction}：最高 {best} TFLOP/s；文件中没有可对比的实现。"),
    "stands_decode": (
        "Decoding reads the cache at up to {share} of the read bandwidth; against {peers} median {median}, from {low} to {high}.",
        "解码以最高 {share} 的读带宽读取缓存；与 {peers} 相比，比值中位数 {median}，范围 {low} 至 {high}。"),
    "stands_predicted": (
        "Predicted, not run: a cost model expects {low} to {high} of the chip's 16-bit peak in the forward pass.",
        "为预测值，未在芯片上运行：代价模型预计前向达到芯片 16 位峰值的 {low} 至 {high}。"),
    "stands_other": ("The files have no attention rows that compare.", "文件中没有可比较的注意力数据。"),
    # tables
    "t.attention": ("Attention", "注意力"), "t.decode": ("KV cache", "KV 缓存"), "t.memory": ("Memory", "内存"),
    "t.host": ("Host time", "主机时间"), "t.model": ("Whole models", "整个模型"), "t.matmul": ("Matrix product", "矩阵乘"),
    "t.feature": ("Features", "功能"), "t.packed": ("Packed sequences", "打包序列"), "t.ceiling": ("Ceilings", "上限"),
    "t.compiled": ("Predictions for Ascend", "昇腾预测"), "t.tile": ("Tiles", "分块"), "t.numerics": ("Numerics", "数值"),
    "t.equivalence": ("Errors", "误差"), "t.unavailable": ("Not measured", "未测"), "t.other": ("Ablations, trials, searches", "消融、试验、搜索"),
    # columns
    "c.device": ("device", "设备"), "c.source": ("source", "来源"), "c.implementation": ("implementation", "实现"),
    "c.pass": ("pass", "方向"), "c.dtype": ("dtype", "dtype"), "c.mask": ("mask", "掩码"), "c.keys": ("keys", "键数"),
    "c.group": ("group", "组"), "c.ratio": ("ratio to best peer", "与最快者之比"), "c.spread": ("spread", "离散度"),
    "c.date": ("date", "日期"), "c.file": ("file", "文件"), "c.share": ("share of peak", "占峰值"), "c.case": ("case", "情形"),
    "c.table": ("group", "组别"), "c.work": ("work", "任务"), "c.reason": ("reason", "原因"), "c.cases": ("cases", "次数"),
    "c.purpose": ("purpose", "用途"), "c.kind": ("kind", "类别"), "c.value": ("value", "数值"), "c.unit": ("unit", "单位"),
    "c.relative": ("times the plain call", "普通调用的倍数"), "c.commit": ("commit", "提交"), "c.tile": ("tile", "分块"),
    "c.ub_kib": ("UB KiB", "UB KiB"), "c.l1_kib": ("L1 KiB", "L1 KiB"), "c.l0c_kib": ("L0C KiB", "L0C KiB"),
    "c.bottleneck": ("waits for", "瓶颈"), "c.status": ("status", "状态"), "c.result": ("worst result", "最差结果"),
    "c.error": ("largest error", "最大误差"), "c.clocks": ("clocks", "时钟"), "c.versions": ("versions", "版本"),
}  # fmt: skip


def phrase(key: str, language: str = "en", **values: Any) -> str:
    """Return a text in a language, with its places filled. A value that is a pair is taken in the same language."""
    which = LANGUAGES.index(language)
    text = WORDS[key][which]
    return (
        text.format(**{name: x[which] if isinstance(x, tuple) else x for name, x in values.items()}) if values else text
    )


def both(key: str, **values: Any) -> tuple[str, str]:
    """Return a text in both languages."""
    return phrase(key, "en", **values), phrase(key, "zh", **values)
