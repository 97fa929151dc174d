"""The text on which the tiny tokenizers are trained.

It holds what replacement texts of media contain in real models: time stamps, frame labels,
counts and runs of newlines, so that these meet merged tokens here as they do there.
"""

TEXT = """\
A heron stands at the edge of the pond and waits. The water is green, the sky is grey.
Please describe the picture. What do you see in the first image, and what in the second?
How many people are in the video? What does the speaker say in the recording?
Listen to the audio and write down the words. Answer in one short sentence.
You are a helpful assistant. The user asks a question and the assistant gives an answer.
system user assistant tool model human question answer image video audio frame picture text
The left half of the image is red and the right half is blue; a small circle is in the middle.
First, second, third, and last. Before and after. Above, below, inside, outside, between.
Frame 1: Frame 2: Frame 3: Frame1: Frame2: Frame10: Picture 1: Picture 2: Video 1: Audio 1:
<0.0 seconds> <0.5 seconds> <1.0 seconds> <1.5 seconds> <12.25 seconds> Time: 0.5s 1.0s 2.5s
00:00 00:01 00:02 00:10 01:30 00:00:00.000 00:00:01.500 00:00:02.000 frame at 3.50 seconds:
0 1 2 3 4 5 6 7 8 9 10 16 24 32 64 100 128 256 512 1000 1024 2048 1.0 2.0 0.25 0.75 3.14
Here is the whole picture, followed by parts of it in full detail. row 1 col 2, tile 3 of 4.
You see frames of a video in the order in which they were recorded.
for index, value in enumerate(values): print(index, value)  # {"key": [1, 2, 3], "name": null}
if not found: raise ValueError("nothing found"); return {"type": "text", "text": "done"}
- one item
- another item
\t1.\tfirst\t2.\tsecond
Grüße aus Köln. Où est la gare ? ¿Qué hora es? Привет, как дела? 今日は良い天気です。你好世界。
spaces:  two   three    four     five
""" + "".join("word" + "\n" * count for count in range(1, 6))
