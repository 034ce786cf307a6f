"""Streams: ordered by routing key, partitioned into segments, scaled while writers and readers run."""

from .block import MAX_EVENT_BYTES as MAX_EVENT_BYTES
from .block import Block as Block
from .block import Headers as Headers
from .config import KeyRange as KeyRange
from .config import ScalingPolicy as ScalingPolicy
from .config import SegmentId as SegmentId
from .config import StreamConfig as StreamConfig
from .config import StreamCut as StreamCut
from .config import StreamInfo as StreamInfo
from .manager import StreamManager as StreamManager
from .segment_reader import SegmentReader as SegmentReader
from .serializers import BytesSerializer as BytesSerializer
from .serializers import JsonSerializer as JsonSerializer
from .serializers import MsgpackSerializer as MsgpackSerializer
from .serializers import PydanticSerializer as PydanticSerializer
from .serializers import Serializer as Serializer
from .staging import StagedPart as StagedPart
from .staging import Staging as Staging
from .state import StreamState as StreamState
from .transaction import Transaction as Transaction
from .transaction import Transactions as Transactions
from .writer import EventWriter as EventWriter
